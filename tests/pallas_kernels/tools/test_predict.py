"""The arithmetic of predictions, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from pallas_kernels.tools import predict
from pallas_kernels.tools.balance import Balance
from pallas_kernels.tools.kernel_jaxpr import Launch
from pallas_kernels.tools.sass import Loop
from pallas_kernels.tools.targets import TARGETS

H200, A100 = TARGETS["h200"], TARGETS["a100"]
# Two warpgroups, each 64 queries times 128 keys, at head dim 128: both products read both operands
# from shared memory, and probabilities go through it.
PREFILL = Launch(
    "prefill", (8, 66, 4), warpgroups=3, in_flight=128 * 1024, copied=64 * 1024,
    flops=2 * 2 * 64 * 128 * 128, operands=2 * (16 + 32) * 1024, stored=16 * 1024,
)  # fmt: skip
DECODE = Launch(
    "decode", (264,), warpgroups=2, in_flight=96 * 1024, copied=32 * 1024,
    flops=2 * 2 * 64 * 8 * 128, operands=36 * 1024, stored=1024,
)  # fmt: skip


def _loop(instructions, flops):
    return Loop(instructions, 0, 0, products=16, copies=0, flops=flops)


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "target", "blocks", "bound"),
    [
        (95, 128, 75816, H200, 3, "shared memory"),  # 3 * (75,816 + 1,024) of 233,472 bytes
        (96, 256, 1024, H200, 2, "registers"),  # 65,536 / (96 * 256) = 2.7
        (90, 256, 1024, H200, 2, "registers"),  # 90 counts as 96
        (32, 1024, 0, H200, 2, "registers"),  # threads allow as many
        (16, 1024, 0, H200, 2, "threads"),
        (16, 32, 0, H200, 32, "blocks"),
        (143, 128, 68608, A100, 2, "shared memory"),
        (168, 384, 231424, A100, 0, "shared memory"),
    ],
)
def test_occupancy(registers, threads, shared, target, blocks, bound):
    assert predict.occupancy(registers, threads, shared, target) == (
        predict.Occupancy(blocks, bound)
    )


def test_clocks_are_those_at_which_data_sheets_count_tensor_rates():
    assert H200.tensor_clock == pytest.approx(1.829e9, rel=1e-3)
    assert A100.tensor_clock == pytest.approx(1.411e9, rel=1e-3)


def test_bytes_in_flight_by_littles_law():
    # 4.8 TB/s over 132 multiprocessors is 36,364 bytes in a microsecond, of which reads reach 92 %.
    assert predict.needed_in_flight(H200) == pytest.approx(33455, abs=1)


def test_prefill():
    found = predict.predict(PREFILL, _loop(500, PREFILL.flops), _loop(300, 0), 1, H200, True)
    # 8.4 MFLOP at 4,096 a clock; 64 + 2 * (96 + 16) KB at 128 bytes a clock; 64 KB at 7 TB/s.
    assert found.clocks["tensor cores"] == 2048
    assert found.clocks["shared memory"] == 288 * 1024 / 128 == 2304
    assert found.clocks["issue"] == 2 * 500 + 300
    assert found.clocks["L2"] == pytest.approx(2261, rel=1e-3)
    assert found.bound == "shared memory"
    # The resources overlap. Busy tensor cores lower the clock rate to 77 to 87 %.
    assert found.of == "tensor"
    assert found.shares == pytest.approx((2048 / 2304 * 0.77, 2048 / 2304 * 0.87), rel=1e-3)
    assert found.tile_s == pytest.approx(
        (2304 / 1.829e9 / 0.87, 2304 / 1.829e9 / 0.77), rel=1e-3
    )  # fmt: skip


def test_decode_at_the_memorys_pace_and_issue_bound():
    found = predict.predict(DECODE, _loop(400, DECODE.flops), None, 2, H200, False)
    # 32 KiB at 92 % of 36,364 bytes/us and 1.83 GHz; 69 KiB through shared memory.
    assert found.clocks["memory"] == pytest.approx(1791, rel=1e-3)
    assert found.clocks["shared memory"] == 69 * 1024 / 128
    assert (found.bound, found.of) == ("memory", "bandwidth")
    assert found.in_flight == 192 * 1024
    # The other clocks are small beside it: (1,791^4 + 552^4 + 400^4 + 64^4)^(1/4) is 1,796 clocks.
    # At 87 % of the bandwidth, the root of the sum of squares is 2,014.
    assert found.shares == pytest.approx((1648.3 / 2014.5, 1648.3 / 1796.0), rel=1e-3)
    slow = predict.predict(DECODE, _loop(3582, DECODE.flops), None, 2, H200, False)
    assert slow.bound == "issue"
    assert slow.shares == pytest.approx((0.402, 0.453), abs=0.005)


def test_too_few_bytes_in_flight_slow_memory():
    shallow = Launch("d", (1,), 2, 16 * 1024, 32 * 1024, DECODE.flops, 0, 0)
    found = predict.predict(shallow, _loop(1, DECODE.flops), None, 1, H200, False)
    assert found.shares == pytest.approx(
        (0.87 * 16 * 1024 / 33455, 0.92 * 16 * 1024 / 33455), rel=5e-3
    )  # fmt: skip


def test_an_unrolled_loop_counts_by_the_tile():
    found = predict.predict(DECODE, _loop(800, 2 * DECODE.flops), None, 2, H200, False)
    assert found.clocks["issue"] == 400


def test_seconds_of_a_call():
    prediction = predict.predict(DECODE, _loop(400, DECODE.flops), None, 2, H200, False)
    even = Balance(264, 0.0, 1.0, 1.0, 264 * 100, 100, 0, 0.0)
    # 100 tiles on each of two thread blocks, and three launches.
    assert predict.seconds(prediction, even, 2, 3, 0, H200) == pytest.approx(
        [200 * tile + 4.5e-6 for tile in prediction.tile_s], rel=1e-3
    )
    assert 200 * prediction.tile_s[0] == pytest.approx(196.4e-6, rel=1e-2)
    merged = replace(even, partial_bytes=10**8)
    more = [
        b - a
        for a, b in zip(
            predict.seconds(prediction, even, 2, 3, 0, H200),
            predict.seconds(prediction, merged, 2, 3, 0, H200),
            strict=True,
        )
    ]
    assert more == pytest.approx([2 * 10**8 / (share * 4.8e12) for share in (0.92, 0.87)])
    # A call takes no less time than memory takes to deliver its bytes.
    floor = predict.seconds(prediction, even, 2, 0, 10**10, H200)
    assert floor == pytest.approx([10**10 / (share * 4.8e12) for share in (0.92, 0.87)])
    # Without a balance, a call reads its bytes at the rate of its loop.
    alone = predict.seconds(prediction, None, 2, 3, 10**10, H200)
    assert alone == pytest.approx(
        [10**10 / (share * 4.8e12) + 4.5e-6 for share in reversed(prediction.shares)]
    )


def test_what_needs_nearly_as_long_delays_more_the_less_it_overlaps():
    """A 4-bit tile takes 1,751 clocks of memory at its nominal bandwidth, 1,728 of shared memory,
    1,774 of issue and 256 of tensor cores."""
    clocks = {"memory": 1751 / 0.92, "shared memory": 1728.0, "issue": 1774.0, "tensor": 256.0}
    least, most = (1751 / predict._delayed(clocks, one) for one in (
        predict.CAUTIOUS, predict.HOPEFUL
    ))  # fmt: skip
    assert (least, most) == pytest.approx((0.55, 0.74), abs=0.01)


def test_ranges_are_shown_from_least_to_most():
    assert predict.percent((0.574, 0.746)) == "57-75%"
