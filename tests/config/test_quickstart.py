"""What the quickstart says when its model learned too little."""

import pytest

from jaxtron import quickstart


@pytest.mark.parametrize(("gain", "status"), [(1.8, 0), (-0.5, 1)])
def test_a_model_that_learned_too_little_is_said(
    gain: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quickstart, "quickstart", lambda *args, **keys: gain)
    assert quickstart.main([]) == status
    message = "-0.500 nats below the unigram entropy, where 1 or more are expected"
    assert (message in capsys.readouterr().err) == bool(status)
