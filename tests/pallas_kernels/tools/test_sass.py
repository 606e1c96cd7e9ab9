"""Finding loops in machine code that is written by hand, and counting the instructions they run."""

import pytest

from pallas_kernels.tools import sass


def _listing(*lines: str) -> str:
    """Labels unchanged, instructions in nvdisasm's format."""
    return "\n".join(
        line if line.endswith(":") else f"   -:-:-:Y:01        /*{16 * i:04x}*/         {line} "
        for i, line in enumerate(lines)
    )


# A loop over items around one over tiles. A failed wait continues out of line; masks and the fetch
# of a later tile are skipped where they are not needed.
DECODE = _listing(
    "MOV R0, R1",
    ".L_x_0:",
    "IADD3 R0, R0, 0x1, RZ",
    ".L_x_1:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5+0x100], R9",
    "@!P1 BRA `(.L_x_5)",
    ".L_x_2:",
    "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT",
    "@!P0 BRA `(.L_x_3)",
    "FSEL R1, R2, R3, P2",
    "FSEL R1, R2, R3, P2",
    ".L_x_3:",
    "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80",
    "@P4 BRA `(.L_x_4)",
    "@UP1 UTMALDG.5D [UR16], [UR8]",
    "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x12818], R22",
    ".L_x_4:",
    "HGMMA.64x8x16.F32.BF16 R24, gdesc[UR20], R24",
    "@P5 BRA `(.L_x_1)",
    "@P6 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_5:",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ+0x100], R9",
    "@!P1 BRA `(.L_x_5)",
    "BRA `(.L_x_2)",
    ".L_x_6:",
    "BRA `(.L_x_6)",
)


def test_a_pass_takes_products_and_copies_and_skips_masks():
    loop, fetching = sass.loops(DECODE)
    # Every instruction from .L_x_1 to the branch back counts, but for the two FSEL and the failed
    # wait.
    assert loop == sass.Loop(
        instructions=10, block_barriers=1, transaction_barriers=2, products=2, copies=1,
        flops=2 * 2 * 64 * 8 * 16,
    )  # fmt: skip
    assert fetching is None


FETCHER = _listing(
    "@P0 BRA `(.L_x_2)",
    ".L_x_0:",
    "@P1 BRA `(.L_x_1)",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR5], R9",
    ".L_x_1:",
    "UTMALDG.3D [UR16], [UR8]",
    "@P1 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_2:",
    "HMMA.16816.F32.BF16 R48, R44, R30, R48",
    "@P3 BRA P2, `(.L_x_2)",
    ".L_x_3:",
    "FSEL R1, R2, R3, P2",
    "HMMA.16816.F32.BF16 R48, R44, R30, R48",
    "@P3 BRA `(.L_x_3)",
    "EXIT",
)


def test_a_warpgroup_that_only_fetches_has_a_loop_of_its_own():
    loop, fetching = sass.loops(FETCHER)
    # Two loops have as many products: the one without masks counts. All four warps multiply.
    assert loop == sass.Loop(2, 0, 0, products=1, copies=0, flops=4 * 2 * 16 * 8 * 16)
    # The wait counts: only the first tiles skip it.
    assert fetching == sass.Loop(4, 0, 1, products=0, copies=1, flops=0)


def test_code_without_loops_over_tiles_has_none():
    assert sass.loops(_listing("MOV R0, R1", "HGMMA.64x8x16.F32.BF16 R24", "EXIT")) == (None, None)


def test_a_region_with_two_entries_is_no_loop():
    """ptxas writes such regions for an A100."""
    region = ".L_x_0:", "HMMA.16816.F32", ".L_x_1:", "LDGSTS.E [R1]", "@P1 BRA `(.L_x_0)", "EXIT"
    assert sass.loops(_listing("@P0 BRA `(.L_x_1)", *region)) == (None, None)


@pytest.mark.parametrize(
    ("opcode", "flops"),
    [
        ("HGMMA.64x256x16.F32", 2 * 64 * 256 * 16),
        ("HMMA.1688.F32", 4 * 2 * 16 * 8 * 8),
        ("FFMA", 0),
    ],
)
def test_flops_of_a_warpgroup(opcode, flops):
    assert sass.Instruction(opcode).flops == flops
