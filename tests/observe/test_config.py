"""What the observe section refuses."""

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxtron.errors import ConfigError
from jaxtron.observe.config import ObserveConfig

load = TypeAdapter(ObserveConfig).validate_python


def test_profile_steps_come_from_a_list():
    assert load({"dir": "run", "profile_steps": [5, 8]}).profile_steps == (5, 8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dir": "run", "profile_steps": [8, 5]}, r"write \[5, 8\]"),
        ({"profile_steps": [5, 8]}, r"set observe\.dir"),
    ],
)
def test_a_trace_that_cannot_be_made_is_refused_with_the_fix(values, message):
    with pytest.raises(ConfigError, match=message):
        load(values)


@pytest.mark.parametrize(
    "values",
    [
        {"dir": "run", "profile_steps": [0, 3]},
        {"dir": "run", "profile_steps": [3]},
        {"progress": "yes"},
        {"wandb": True},
    ],
)
def test_values_of_the_wrong_form_are_refused(values):
    with pytest.raises(ValidationError):
        load(values)
