"""Scripts about what the control plane relies on in ZeroMQ.

Each runs on real ZeroMQ and on its model, and must observe the same on both. Where real ZeroMQ may
end in several ways, the script observes what all of them have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulated.zeromq_sockets import EVENTS

Script = Callable[[Any], Any]

SCRIPTS: list[Script] = []

#: By default, a connection that no process serves is closed after 30 s.
PATIENT = {"HANDSHAKE_IVL": 600_000}


def script(function: Script) -> Script:
    SCRIPTS.append(function)
    return function


def _router(stage: Any, url: str, **options: Any) -> Any:
    """The router of a process of its own, as the notebook and the relay have one."""
    options = {"ROUTER_HANDOVER": 1, "ROUTER_MANDATORY": 1, **options}
    return stage.process().socket("ROUTER", **options).bind(url)


def _dealer(stage: Any, url: str, name: bytes = b"a", **options: Any) -> Any:
    dealer = stage.process().events_socket("DEALER", IDENTITY=name, **options)
    dealer.connect(url)
    return dealer


# Queues before a connection.
@script
def a_dealer_may_connect_before_its_router_binds(stage: Any) -> Any:
    dealer = _dealer(stage, url := stage.url())
    dealer.send_all(b"1", b"2", b"3")
    return _router(stage, url).messages(3)


@script
def a_dealer_may_connect_to_a_path_before_its_router_binds(stage: Any) -> Any:
    dealer = _dealer(stage, url := stage.ipc())
    dealer.send_all(b"1", b"2", b"3")
    return _router(stage, url).messages(3)


@script
def a_push_may_connect_before_its_pull_binds(stage: Any) -> Any:
    push = stage.process().socket("PUSH").connect(url := stage.url())
    push.send_all(b"1", b"2", b"3")
    return stage.process().socket("PULL").bind(url).messages(3)


@script
def without_a_limit_many_messages_wait_for_a_connection(stage: Any) -> Any:
    push = stage.process().socket("PUSH").connect(url := stage.url())
    sent = [b"%d" % number for number in range(2500)]  # the usual limit is 1000 at each end
    push.send_all(*sent, flags="NOBLOCK")
    found = stage.process().socket("PULL").bind(url).messages(2500)
    return found == [[each] for each in sent]


@script
def at_its_limit_a_socket_refuses_a_message_at_once(stage: Any) -> Any:
    push = stage.process().socket("PUSH", SNDHWM=3).connect(url := stage.url())
    refused = [push.refusal(b"%d" % number, flags="NOBLOCK") for number in range(5)]
    return refused, stage.process().socket("PULL").bind(url).messages(3)


@script
def a_dealer_without_a_peer_refuses_a_message_at_once(stage: Any) -> Any:
    return stage.process().socket("DEALER").refusal(b"1", flags="NOBLOCK")


@script
def an_empty_socket_refuses_to_receive_at_once(stage: Any) -> Any:
    pull = stage.process().socket("PULL").bind(stage.url())
    return _error_of(lambda: pull._call("receive_now"))


def _error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return str(error)
    return ""


# The router's addresses.
@script
def a_router_refuses_a_message_to_a_name_that_never_came(stage: Any) -> Any:
    return _router(stage, stage.url()).refusal(b"a", b"1")


@script
def a_router_that_need_not_deliver_drops_a_message_to_a_name_that_never_came(stage: Any) -> Any:
    router = _router(stage, url := stage.url(), ROUTER_MANDATORY=0)
    router.send(b"a", b"1")
    dealer = _dealer(stage, url)
    dealer.send(b"here")
    router.receive()
    router.send(b"a", b"2")
    return dealer.receive()


@script
def a_router_can_send_to_a_client_that_has_sent_nothing(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    refused = router.sends_until("", b"a", b"1")
    return refused, dealer.receive()


@script
def a_router_refuses_a_message_once_its_client_was_killed(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"here")
    router.receive()
    dealer.process.kill()
    return router.sends_until("EHOSTUNREACH", b"a", b"1")


@script
def a_client_that_is_started_again_gets_only_what_was_sent_since(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    first = _dealer(stage, url)
    first.send(b"first")
    seen = [router.receive()]
    first.process.kill()
    router.sends_until("EHOSTUNREACH", b"a", b"lost")
    second = _dealer(stage, url)
    second.send(b"second")
    seen.append(router.receive())
    router.send(b"a", b"new")
    return seen, second.receive()


@script
def a_router_serves_two_urls(stage: Any) -> Any:
    router = _router(stage, one := stage.url()).bind(two := stage.ipc())
    dealers = [_dealer(stage, one, b"a"), _dealer(stage, two, b"b")]
    for dealer in dealers:
        dealer.send(b"here")
    found = sorted(router.messages(2))
    for name in (b"a", b"b"):
        router.send(name, b"to " + name)
    return found, [dealer.receive() for dealer in dealers]


@script
def a_client_without_a_name_gets_one(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = stage.process().socket("DEALER").connect(url)
    dealer.send(b"here")
    name, said = router.receive()
    router.send(name, b"1")
    return len(name), name[:1], said, dealer.receive()


# Handover.
@script
def after_a_handover_messages_go_to_the_second_client(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    first = _dealer(stage, url)
    first.send(b"first")
    router.receive()
    router.send(b"a", b"1")
    seen = [first.receive()]
    second = _dealer(stage, url)
    second.send(b"second")
    router.receive()
    router.send(b"a", b"2")
    return seen, second.receive()


@script
def after_a_handover_the_first_client_stays_connected_in_vain(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    first = _dealer(stage, url)
    first.send(b"first")
    router.receive()
    seen = [first.event()]
    second = _dealer(stage, url)
    second.send(b"second")
    router.receive()
    first.send(b"in vain")
    third = _dealer(stage, url, b"c")
    third.send(b"marker")
    return seen, router.messages_until(b"marker"), first.has_event()


@script
def a_handover_may_drop_what_the_first_client_sent_and_was_not_read(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    first = _dealer(stage, url)
    first.send(b"first")
    seen = [router.receive()]
    first.send(b"unread")
    second = _dealer(stage, url)
    second.send(b"second")
    seen += router.messages_until(b"second")
    router.send(b"a", b"1")
    return [each for each in seen if each != [b"a", b"unread"]], second.receive()


@script
def a_client_that_ended_before_its_message_was_read_loses_its_name_to_the_next(stage: Any) -> Any:
    server = stage.process()
    router = server.events_socket("ROUTER", ROUTER_HANDOVER=1, ROUTER_MANDATORY=1)
    router.bind(url := stage.url())
    first = _dealer(stage, url)
    first.send(b"unread")
    first.process.end(linger=-1)
    events = router.events_until("DISCONNECTED")
    second = _dealer(stage, url)
    second.send(b"second")
    events += router.events_until("HANDSHAKE_SUCCEEDED")
    found = {said: name for name, said in router.messages(2)}
    router.send(b"a", b"1")
    return events, found[b"second"], found[b"unread"][:1], len(found[b"unread"]), second.receive()


# Ends of processes.
@script
def what_a_client_that_ended_has_sent_can_still_be_read(stage: Any) -> Any:
    server = stage.process()
    router = server.events_socket("ROUTER").bind(url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"1")
    router.receive()
    dealer.send(b"2")
    dealer.send(b"3")
    dealer.process.end(linger=-1)
    router.events_until("DISCONNECTED")
    return router.messages(2)


@script
def what_a_killed_server_has_sent_can_still_be_read(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"here")
    router.receive()
    router.send(b"a", b"1")
    dealer.process.ready(dealer)
    router.process.kill()
    dealer.events_until("DISCONNECTED")
    return dealer.receive()


@script
def a_dealer_keeps_what_it_sends_while_its_server_is_gone(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"0")
    seen = [router.receive()]
    router.process.kill()
    dealer.events_until("DISCONNECTED")
    dealer.send_all(b"1", b"2", b"3")
    return seen + _router(stage, url).messages(3)


@script
def a_push_keeps_what_it_sends_while_its_server_is_gone(stage: Any) -> Any:
    pull = stage.process().socket("PULL").bind(url := stage.url())
    push = stage.process().events_socket("PUSH").connect(url)
    push.send(b"0")
    seen = [pull.receive()]
    pull.process.kill()
    push.events_until("DISCONNECTED")
    push.send_all(b"1", b"2", b"3")
    return seen + stage.process().socket("PULL").bind(url).messages(3)


@script
def a_path_of_a_killed_server_can_be_bound_again(stage: Any) -> Any:
    router = _router(stage, url := stage.ipc())
    dealer = _dealer(stage, url)
    dealer.send(b"0")
    seen = [router.receive()]
    router.process.kill()
    dealer.events_until("DISCONNECTED")
    dealer.send(b"1")
    return seen + _router(stage, url).messages(1)


@script
def a_tcp_port_is_bound_once(stage: Any) -> Any:
    _router(stage, url := stage.url())
    return _error_of(lambda: _router(stage, url))


@script
def a_path_that_is_bound_twice_leads_to_the_second(stage: Any) -> Any:
    first = _router(stage, url := stage.ipc())
    before = _dealer(stage, url, b"before")
    before.send(b"0")
    seen = [first.receive()]
    second = _router(stage, url)
    after = _dealer(stage, url, b"after")
    after.send(b"1")
    before.send(b"2")
    return seen, second.receive(), first.receive()


@script
def a_path_still_leads_to_the_second_when_the_first_is_closed(stage: Any) -> Any:
    first = _router(stage, url := stage.ipc())
    second = _router(stage, url)
    first.process.end()
    dealer = _dealer(stage, url)
    dealer.send(b"1")
    return second.receive()


@script
def a_socket_can_bind_what_another_has_just_closed(stage: Any) -> Any:
    router = _router(stage, url := stage.ipc())
    dealer = _dealer(stage, url)
    dealer.send(b"0")
    router.receive()
    router.close()
    again = router.process.socket("ROUTER").bind(url)
    dealer.events_until("DISCONNECTED")
    dealer.send(b"1")
    return again.receive()


# Closing.
@script
def with_a_linger_a_context_sends_all_before_it_ends(stage: Any) -> Any:
    pull = stage.process().socket("PULL").bind(url := stage.url())
    push = stage.process().socket("PUSH").connect(url)
    push.send_all(*(sent := [b"%d" % number for number in range(500)]))
    push.process.end(linger=-1)
    return pull.messages(500) == [[each] for each in sent]


@script
def with_a_linger_a_closed_socket_still_waits_for_its_peer(stage: Any) -> Any:
    push = stage.process().socket("PUSH").connect(url := stage.url())
    push.send(b"1")
    push.close(linger=-1)
    return stage.process().socket("PULL").bind(url).receive()


@script
def without_a_linger_what_waits_for_a_connection_is_dropped(stage: Any) -> Any:
    push = stage.process().socket("PUSH").connect(url := stage.url())
    push.send(b"dropped")
    push.process.end(linger=0)
    pull = stage.process().socket("PULL").bind(url)
    stage.process().socket("PUSH").connect(url).send(b"marker")
    return pull.receive()


@script
def a_router_with_a_linger_sends_all_before_its_context_ends(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"here")
    router.receive()
    for number in range(300):
        router.send(b"a", b"%d" % number)
    router.process.end(linger=-1)
    return dealer.messages(300) == [[b"%d" % number] for number in range(300)]


# Events.
@script
def a_refused_connection_is_closed_until_the_server_is_there(stage: Any) -> Any:
    dealer = _dealer(stage, url := stage.url())
    seen = [dealer.event()]
    _router(stage, url)
    return seen + dealer.events_until("HANDSHAKE_SUCCEEDED")[-1:]


@script
def a_refused_path_is_closed_until_the_server_is_there(stage: Any) -> Any:
    dealer = _dealer(stage, url := stage.ipc())
    seen = [dealer.event()]
    _router(stage, url)
    return seen + dealer.events_until("HANDSHAKE_SUCCEEDED")[-1:]


@script
def a_killed_server_is_seen_as_a_disconnection_and_then_refusals(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    seen = [dealer.event()]
    router.process.kill()
    seen += dealer.events_until("CLOSED")
    _router(stage, url)
    return seen, dealer.events_until("HANDSHAKE_SUCCEEDED")[-1]


@script
def a_closed_server_is_seen_as_a_disconnection_and_then_refusals(stage: Any) -> Any:
    router = _router(stage, url := stage.ipc())
    dealer = _dealer(stage, url)
    seen = [dealer.event()]
    router.close()
    return seen + dealer.events_until("CLOSED")


@script
def a_monitor_has_only_the_events_that_it_asked_for(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = stage.process().socket("DEALER", ("DISCONNECTED",), IDENTITY=b"a").connect(url)
    dealer.send(b"here")
    router.receive()
    router.process.kill()
    return dealer.event()


@script
def a_socket_goes_on_without_its_monitor(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    seen = dealer.event()
    dealer._call("stop_monitor")
    router.process.kill()
    again = _router(stage, url)
    again.sends_until("", b"a", b"1")
    return seen, dealer.receive()


@script
def two_sockets_of_a_process_have_events_of_their_own(stage: Any) -> Any:
    router = _router(stage, one := stage.url())
    pull = stage.process().socket("PULL").bind(two := stage.url())
    process = stage.process()
    dealer = process.events_socket("DEALER", IDENTITY=b"a").connect(one)
    push = process.events_socket("PUSH").connect(two)
    seen = [dealer.event(), push.event()]
    pull.process.kill()
    seen += push.events_until("DISCONNECTED")
    dealer.send(b"1")
    return seen, router.receive(), dealer.has_event()


# Interrupted connections.
@script
def a_connection_that_is_cut_is_made_again(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, (line := stage.line(url)).url)
    dealer.send(b"1")
    seen = [router.receive()]
    line.cut()
    events = [dealer.event() for _ in range(3)]
    dealer.send(b"2")
    return events, [*seen, router.receive()]


@script
def what_a_dealer_has_sent_is_lost_with_its_connection(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, (line := stage.line(url)).url)
    dealer.send(b"1")
    seen = [router.receive()]
    line.hold()
    dealer.send(b"lost")
    line.await_sent()
    line.cut()
    dealer.events_until("DISCONNECTED")
    dealer.send(b"3")
    return [*seen, router.receive()]


@script
def what_a_router_has_sent_is_lost_with_its_connection(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, (line := stage.line(url)).url)
    dealer.send(b"1")
    router.receive()
    line.hold()
    refused = router.refusal(b"a", b"lost")
    line.await_sent()
    line.cut()
    dealer.events_until("DISCONNECTED")
    dealer.send(b"again")
    seen = router.receive()
    router.send(b"a", b"2")
    return refused, seen, dealer.receive()


@script
def messages_that_are_held_arrive_in_order_later(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, (line := stage.line(url)).url)
    dealer.send(b"0")
    seen = [router.receive()]
    line.hold()
    dealer.send_all(b"1", b"2", b"3")
    line.await_sent()
    line.release()
    return seen + router.messages(3), dealer.event(), dealer.has_event()


@script
def a_message_over_a_connection_that_is_cut_arrives_whole_and_at_most_once(stage: Any) -> Any:
    pull = stage.process().socket("PULL").bind(url := stage.url())
    push = stage.process().events_socket("PUSH").connect((line := stage.line(url)).url)
    push.event()
    for number in range(600):
        push.send(b"%03d" % number, b"%03d" % number)
        if number in (200, 400):
            line.cut()
            push.events_until("HANDSHAKE_SUCCEEDED")
    found = pull.messages_until(b"599", b"599")
    numbers = [first for first, _ in found]
    # Those of the last connection may be read before the rest of the one before.
    return len(numbers) == len(set(numbers)), all(first == second for first, second in found)


@script
def heartbeats_end_the_connection_to_a_server_that_stands_still(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url, HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=500)
    seen = [dealer.event()]
    router.process.stop()
    seen += dealer.events_until("DISCONNECTED")[-1:]
    router.process.go_on()
    # On a slow machine, it may be disconnected again.
    while not router.process.ready(router, limit=100):
        dealer.send(b"1")
    return seen, router.receive()


@script
def without_heartbeats_a_server_that_stands_still_loses_nothing(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    seen = [dealer.event()]
    router.process.stop()
    for each in (b"1", b"2"):
        dealer.send(each)
    router.process.go_on()
    return seen, router.messages(2), dealer.has_event()


@script
def a_client_that_stands_still_gets_everything_later(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    dealer.send(b"here")
    router.receive()
    dealer.process.stop()
    refused = [router.refusal(b"a", each) for each in (b"1", b"2")]
    dealer.process.go_on()
    return refused, dealer.messages(2)


# Listening sockets that several processes have.
@script
def a_connection_waits_until_a_process_serves_the_socket(stage: Any) -> Any:
    dealer = _dealer(stage, stage.listen("door"), **PATIENT)
    dealer.send(b"1")
    router = stage.process("door").socket("ROUTER", USE_FD="door").bind("tcp://127.0.0.1:*")
    return router.receive(), dealer.event(), dealer.has_event()


@script
def another_process_goes_on_with_the_socket_of_a_killed_one(stage: Any) -> Any:
    url = stage.listen("door")
    one, other = stage.process("door"), stage.process("door")
    router = one.socket("ROUTER", USE_FD="door").bind("tcp://127.0.0.1:*")
    dealer = _dealer(stage, url, **PATIENT)
    dealer.send(b"1")
    seen = [router.receive()]
    one.kill()
    events = dealer.events_until("DISCONNECTED")
    dealer.send(b"2")
    router = other.socket("ROUTER", USE_FD="door").bind("tcp://127.0.0.1:*")
    events.append(dealer.event())
    return [*seen, router.receive()], events


@script
def a_socket_that_listens_is_gone_with_the_last_process_that_has_it(stage: Any) -> Any:
    url = stage.listen("door")
    one = stage.process("door")
    stage.leave("door")
    one.socket("ROUTER", USE_FD="door").bind("tcp://127.0.0.1:*")
    dealer = _dealer(stage, url)
    events = dealer.events_until("HANDSHAKE_SUCCEEDED")
    one.kill()
    return events + dealer.events_until("CLOSED")


@script
def a_connection_that_no_process_serves_is_tried_again(stage: Any) -> Any:
    dealer = _dealer(stage, stage.listen("door"), HANDSHAKE_IVL=500)
    seen = [dealer.event(), dealer.event()]
    dealer.send(b"1")
    router = stage.process("door").socket("ROUTER", USE_FD="door").bind("tcp://127.0.0.1:*")
    return seen, router.receive()


@script
def a_connection_that_ends_before_a_process_serves_it_is_a_failed_handshake(stage: Any) -> Any:
    url = stage.listen("door")
    dealer = stage.process().socket("DEALER", ("CONNECTED", *EVENTS), **PATIENT).connect(url)
    seen = [dealer.event()]
    stage.leave("door")
    seen += dealer.events_until("DISCONNECTED")
    return [*seen, dealer.event()]


# Messages.
@script
def a_message_arrives_with_all_its_frames(stage: Any) -> Any:
    router = _router(stage, url := stage.url())
    dealer = _dealer(stage, url)
    frames = [b"", b"1", b"", b"x" * 300_000, b""]
    dealer.send(*frames)
    name, *found = router.receive()
    router.send(name, *found)
    return found == frames, dealer.receive() == frames


@script
def a_frame_that_is_too_large_ends_the_connection_and_is_lost(stage: Any) -> Any:
    router = _router(stage, url := stage.url(), MAXMSGSIZE=100)
    dealer = _dealer(stage, url)
    dealer.send(b"x" * 100)
    seen = [len(router.receive()[1])]
    dealer.send(b"x" * 101)
    events = dealer.events_until("DISCONNECTED")
    dealer.send(b"small")
    return seen, events, router.receive()


@script
def messages_of_several_clients_keep_the_order_of_each(stage: Any) -> Any:
    pull = stage.process().socket("PULL").bind(url := stage.url())
    for name in (b"a", b"b", b"c"):
        push = stage.process().socket("PUSH").connect(url)
        for number in range(50):
            push.send(name, b"%02d" % number)
    found = pull.messages(150)
    by_name = [[n for each, n in found if each == name] for name in (b"a", b"b", b"c")]
    return [each == [b"%02d" % number for number in range(50)] for each in by_name]


@script
def a_router_that_reads_nothing_can_still_send(stage: Any) -> Any:
    router = _router(stage, url := stage.ipc(), RCVHWM=1)
    dealer = _dealer(stage, url)
    dealer.send_all(*(b"%d" % number for number in range(500)), flags="NOBLOCK")
    return router.sends_until("", b"a", b"1"), dealer.receive()


@script
def a_poller_finds_the_sockets_that_have_messages(stage: Any) -> Any:
    process = stage.process()
    router = process.socket("ROUTER").bind(one := stage.url())
    pull = process.socket("PULL").bind(two := stage.url())
    silent = process.socket("PULL").bind(stage.url())
    all_of_them = [router, pull, silent]
    before = process.ready(*all_of_them, limit=0)
    push = stage.process().socket("PUSH").connect(two)
    push.send(b"1")
    seen = [all_of_them.index(each) for each in process.ready(*all_of_them)]
    pull.receive()
    _dealer(stage, one).send(b"2")
    seen += [all_of_them.index(each) for each in process.ready(*all_of_them)]
    return before, seen


@script
def a_pair_within_a_process_wakes_its_other_end(stage: Any) -> Any:
    process = stage.process()
    reader = process.socket("PAIR").bind("inproc://stop")
    writer = process.socket("PAIR").connect("inproc://stop")
    before = process.ready(reader, limit=0)
    writer.send(b"")
    return before, process.ready(reader) == [reader], reader.receive()
