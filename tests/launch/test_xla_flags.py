import jax
import jax.numpy as jnp
import pytest

from jaxtron.errors import ConfigError
from jaxtron.launch.xla_flags import (
    AT_ONCE,
    COPIES,
    DETERMINISTIC,
    PERMUTATIONS,
    TABLE,
    check_known,
    combine,
    compiler_options,
    copies_permutations,
    step_flags,
    table_rows,
    unmeasured,
    with_determinism,
    words,
)

TRITON = "xla_gpu_enable_triton_gemm"


def test_table_serves_only_what_was_measured():
    found = {row.name: row.value for row in table_rows("9.0", "0.11.2")}
    assert found == {TRITON: "false", "xla_gpu_dot_merger_threshold_mb": "0"}
    for capability, version in ((None, "0.11.2"), ("8.0", "0.11.2"), ("9.0", "0.10.2")):
        assert table_rows(capability, version) == ()


def test_rows_that_only_a_compiled_step_speaks_for_hold_and_the_rest_is_told():
    rows = table_rows("9.0", "0.12.0.1")
    assert [row.name for row in rows] == [TRITON, "xla_gpu_dot_merger_threshold_mb"]
    kinds = ["branching", "exchange", "permutations"]
    assert step_flags("9.0", "0.12.0.1", "", kinds) == {AT_ONCE: "4"}
    told = unmeasured("9.0", "0.12.0.1")
    assert told is not None and TRITON not in told and "jax==0.11.*" in told and "0.12.0.1" in told
    assert COPIES in told and PERMUTATIONS in told


@pytest.mark.parametrize(
    "capability, version, words_told",
    [
        (None, "0.10.2", None),
        ("9.0", "0.11.2", None),
        ("9.0", "0.10.2", ["0.10.2", TRITON, "jax==0.11.*", "runtime.xla_flags"]),
        ("10.0", "0.11.2", ["10.0", "runtime.xla_flags"]),
    ],
)
def test_gpus_and_versions_that_were_not_measured_are_told(capability, version, words_told):
    told = unmeasured(capability, version)
    if words_told is None:
        assert told is None
    else:
        assert told is not None and all(word in told for word in words_told)


def test_a_step_has_flags_by_its_kind_unless_they_are_given():
    of_kind = {
        "branching": {AT_ONCE: "4"},
        "exchange": {COPIES: "true"},
        "permutations": {PERMUTATIONS: "peer"},
        "parts": {AT_ONCE: "4"},
    }
    named = f"--xla_a=1 --{AT_ONCE}=1 --{COPIES}=false --{PERMUTATIONS}=private"
    for kinds in ([], *([kind] for kind in of_kind), list(of_kind)):
        expected = {name: value for kind in kinds for name, value in of_kind[kind].items()}
        assert step_flags("9.0", "0.11.2", "--xla_a=1", kinds) == expected
        assert step_flags("9.0", "0.11.2", named, kinds) == {}
        for capability, version in ((None, "0.11.2"), ("8.0", "0.11.2"), ("9.0", "0.10.2")):
            assert step_flags(capability, version, "", kinds) == {}


def test_flags_of_a_step_are_such_as_jax_takes():
    flags = step_flags("9.0", "0.11.2", "", ["branching", "exchange", "permutations"])
    assert {f"--{COPIES}=true", f"--{PERMUTATIONS}=peer"} < set(words(flags))
    step = jax.jit(lambda x: x + 1, compiler_options=compiler_options(flags))
    assert step(jnp.ones(2)).tolist() == [2, 2]


def test_permutations_are_copied_on_measured_gpus_or_where_asked_for():
    assert copies_permutations("9.0", "0.11.2", "--xla_a=1")
    for capability, version in (("8.0", "0.11.2"), ("9.0", "0.10.2")):
        assert not copies_permutations(capability, version, "")
        assert copies_permutations(capability, version, f"--{PERMUTATIONS}=PEER")
    assert not copies_permutations(None, "0.11.2", f"--{PERMUTATIONS}=peer")
    given = f"--{PERMUTATIONS}=peer --{PERMUTATIONS}=private"
    assert not copies_permutations("9.0", "0.11.2", given)


@pytest.mark.parametrize(
    "environment, overrides, result",
    [
        ("", {}, f"--{TRITON}=false"),
        ("--xla_a=1", {}, f"--xla_a=1 --{TRITON}=false"),
        (f"--{TRITON}=true", {}, f"--{TRITON}=true"),
        (f"--{TRITON}", {}, f"--{TRITON}"),
        ("", {TRITON: True}, f"--{TRITON}=true"),
        ("", {TRITON: None}, ""),
        (f"--{TRITON}=true --xla_a=1", {TRITON: None}, "--xla_a=1"),
        ("--xla_a=1", {"xla_a": 2, TRITON: None}, "--xla_a=2"),
        ("", {f"--{TRITON}": "true", "xla_b": 1.5}, f"--{TRITON}=true --xla_b=1.5"),
    ],
)
def test_user_flags_count_before_the_environment_and_that_before_the_table(
    environment, overrides, result
):
    rows = tuple(row for row in table_rows("9.0", "0.11.2") if row.name == TRITON)
    assert combine(rows, environment, overrides)[0] == result


@pytest.mark.parametrize("name", ["gpu_enable_triton_gemm", "xla_a=1", "xla a"])
def test_a_name_that_is_no_xla_flag_is_refused(name):
    with pytest.raises(ConfigError, match=r"runtime\.xla_flags"):
        combine((), "", {name: 1})


def test_a_flag_that_xla_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=rf"xla_flags\.{TRITON[:-1]}: .* nearest are {TRITON}"):
        check_known([TRITON, TRITON[:-1]])


def test_flags_that_jaxtron_and_its_docs_name_are_known():
    known = ("xla_force_host_platform_device_count", "xla_dump_to", "xla_cpu_multi_thread_eigen")
    check_known([*DETERMINISTIC, *(row.name for row in TABLE), *known])


def test_determinism_counts_before_everything_and_keeps_other_flags():
    overrides = with_determinism({"xla_a": 1, "xla_gpu_deterministic_ops": True})
    flags, _ = combine((), "--xla_gpu_autotune_level=4 --xla_b", overrides)
    expected = {f"--{name}={value}" for name, value in DETERMINISTIC.items()}
    assert set(flags.split()) == {"--xla_a=1", "--xla_b", *expected}


@pytest.mark.parametrize("value", [4, None, "1"])
def test_a_flag_against_determinism_is_refused(value):
    with pytest.raises(ConfigError, match=r"xla_gpu_autotune_level is .*deterministic needs 0"):
        with_determinism({"--xla_gpu_autotune_level": value})
