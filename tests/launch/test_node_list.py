import pytest

from jaxtron.errors import LaunchError
from jaxtron.launch.node_list import expand_node_list


@pytest.mark.parametrize(
    "text, first",
    [
        ("alpha,beta", "alpha"),
        ("linux[1,2]", "linux1"),
        ("host[001,003-004,006]", "host001"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA"),
        ("a-[09-11]", "a-09"),
        ("gpu7", "gpu7"),
    ],
)
def test_first_host_of_a_node_list(text, first):
    assert expand_node_list(text)[0] == first


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("host[001,003-004,006]", "host001 host003 host004 host006"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("a-[09-11]", "a-09 a-10 a-11"),
        ("a[9-11]", "a9 a10 a11"),
        ("a[098-101]", "a098 a099 a100 a101"),
        ("rack[1-2]n[01-02]-ib", "rack1n01-ib rack1n02-ib rack2n01-ib rack2n02-ib"),
        ("n[1,x[3-4]],m", "n1 nx3 nx4 m"),
        ("a, b", "a b"),
    ],
)
def test_every_host_of_a_node_list_in_order(text, hosts):
    assert " ".join(expand_node_list(text)) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n1]", "n[3-1]", "a,,b", "n[]", ""])
def test_malformed_node_list_is_refused_with_its_text(text):
    with pytest.raises(LaunchError, match="node list") as caught:
        expand_node_list(text)
    assert repr(text) in str(caught.value)
