"""The switch: when a frame goes out."""

from foretell.pytorch.ranks.wires import Switch

A, B, C = b"\x02" * 6, b"\x04" * 6, b"\x06" * 6


def frame(to, sender, size=1000):
    return to + sender + b"\x00" * (size - 12)


def test_a_frame_takes_both_links_and_the_delay():
    switch = Switch([10, 11], [1000.0, 500.0], 0.25)
    switch.take(1, frame(b"\xff" * 6, B), 0.0)  # now B is known: 2 s up its link, 1 s down A's
    assert [(at, port) for at, _, port, _ in switch.waiting] == []  # later than its queue allows
    switch = Switch([10, 11], [1e5, 5e4], 0.25)
    switch.take(1, frame(b"\xff" * 6, B), 0.0)
    ((at, _, port, _),) = switch.waiting
    assert port == 0
    assert abs(at - (1000 / 5e4 + 1000 / 1e5 + 0.25)) < 1e-12


def test_frames_share_a_link_one_after_the_other():
    switch = Switch([10, 11, 12], [1e5, 1e5, 1e5], 0.0)
    switch.take(1, frame(A, B), 0.0)
    switch.waiting.clear()
    switch.known = {A: 0, B: 1, C: 2}
    switch.up, switch.down = [0.0] * 3, [0.0] * 3
    switch.take(1, frame(A, B), 0.0)
    switch.take(2, frame(A, C), 0.0)
    assert sorted(round(at, 6) for at, *_ in switch.waiting) == [0.02, 0.03]


def test_an_unknown_address_goes_everywhere_a_known_one_to_its_port():
    switch = Switch([10, 11, 12], [0.0] * 3, 0.0)
    switch.take(0, frame(B, A), 0.0)
    assert sorted(port for _, _, port, _ in switch.waiting) == [1, 2]
    switch.waiting.clear()
    switch.take(1, frame(A, B), 0.0)
    assert [port for _, _, port, _ in switch.waiting] == [0]
