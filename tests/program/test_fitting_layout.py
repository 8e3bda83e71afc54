"""Generation: its options, and a layout of its own on fewer devices than the run had."""

import pytest

from jaxtron.config.validate import validate_for_training
from jaxtron.errors import ConfigError
from jaxtron.generate import fitting_layout, main
from tests.parity.harness import make_config


def test_the_layout_of_the_run_is_kept_where_it_fits(capsys) -> None:
    config = make_config(parallel={"fsdp": 2, "tensor": 4})
    assert fitting_layout(config, 8) is config
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("devices", "tensor"), [(1, 1), (2, 2), (4, 4), (3, 1), (6, 2)])
def test_tensor_takes_what_model_and_devices_allow(devices: int, tensor: int, capsys) -> None:
    """8 heads in 2 groups, vocabulary 104: tensor 3 and 6 divide none of them."""
    config = make_config(parallel={"fsdp": 16, "tensor": 8}, train={"global_batch_size": 32})
    chosen = fitting_layout(config, devices)
    axes = validate_for_training(chosen, devices)
    assert (axes["tensor"], axes["fsdp"]) == (tensor, devices // tensor)
    assert chosen.model == config.model and chosen.precision == config.precision
    message = f"parallel.tensor={tensor} parallel.fsdp={devices // tensor}"
    assert message in capsys.readouterr().err


def test_what_no_layout_mends_is_reported() -> None:
    config = make_config(data={"seq_length": 99})
    with pytest.raises(ConfigError, match="data.seq_length 99 is longer"):
        fitting_layout(config, 1)


@pytest.mark.parametrize(
    "words", [["--temperature", "-1"], ["--temperature", "nan"], ["--top-k", "0"], ["--seed", "-1"]]
)
def test_options_out_of_range_are_refused(words: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--config", "tiny", "--prompt", "a", *words])
    assert f"argument {words[0]}: it is {words[1]}: give" in capsys.readouterr().err
