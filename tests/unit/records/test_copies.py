"""Which rank of another host stores a copy of what a rank keeps."""

from allranks.records.ranks import copy_holders


def test_copies_of_a_host_are_spread_over_the_others():
    hosts = ("h1",) * 4 + ("h2",) * 4 + ("h3",) * 4
    holders = copy_holders(hosts)
    assert holders[:4] == (4, 8, 5, 9)
    assert all(hosts[rank] != hosts[holder] for rank, holder in enumerate(holders))


def test_on_one_host_each_rank_holds_its_own():
    assert copy_holders((0, 0, 0)) == (0, 1, 2)
