"""A checkpoint of another architecture is refused though every shape fits."""

import pytest

from jaxtron.checkpoint.model_match import require_same_model
from jaxtron.errors import CheckpointError

MODEL = {"num_layers": 4, "num_attention_heads": 8, "rotary_base": 10000.0, "hidden_dropout": 0.1}


def test_differing_keys_are_listed_with_both_values():
    current = {**MODEL, "num_attention_heads": 4, "rotary_base": 5e5, "qk_layernorm": True}
    with pytest.raises(CheckpointError) as caught:
        require_same_model(MODEL, current, where="runs/a/7")
    message = str(caught.value)
    assert "runs/a/7" in message and "num_layers" not in message
    assert "model.num_attention_heads: checkpoint 8, run 4" in message
    assert "model.rotary_base: checkpoint 10000.0, run 500000.0" in message
    assert "model.qk_layernorm: checkpoint (not set), run True" in message


def test_keys_that_do_not_change_the_weights_meaning_may_differ():
    current = {**MODEL, "hidden_dropout": 0.0}
    require_same_model(MODEL, current, where="x", may_differ={"hidden_dropout"})
    with pytest.raises(CheckpointError, match="hidden_dropout"):
        require_same_model(MODEL, current, where="x")
