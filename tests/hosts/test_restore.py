"""The hosts that all files share are as they were at first, whatever a file has done to them."""


def test_a_host_that_is_not_as_it_was_is_named_and_booted(hosts):
    hosts.crash("h0")
    hosts.cut("h1")
    hosts.on("h2", "touch", "/tmp/left")
    assert hosts.restore(0) == ["h0 is off", "h1 is cut off", "h2: /tmp/left"]
    assert hosts.restore(0) == []
    for host in ("h1", "h2"):
        assert hosts.on("h0", "ssh", host, "hostname") == f"{host}\n"


def test_hosts_that_are_as_they_were_are_not_booted(hosts):
    hosts.on("h1", "mkdir", "/run/stays")
    assert hosts.restore(0) == []
    hosts.on("h1", "rmdir", "/run/stays")
