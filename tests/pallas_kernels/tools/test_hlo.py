"""Reading compiled programs, on a small one that is written by hand."""

import pytest

from pallas_kernels.tools.hlo import Program, Traffic

TEXT = """
HloModule jit_run, is_scheduled=true

%fused_slice (param_0: f32[100,8]) -> bf16[10,8] {
  %param_0 = f32[100,8]{1,0} parameter(0)
  %twice = f32[100,8]{1,0} add(%param_0, %param_0)
  %part = f32[10,8]{1,0} slice(%twice), slice={[0:10], [0:8]}
  ROOT %narrow = bf16[10,8]{1,0} convert(%part)
}

%fused_write (pool: bf16[1000,8], at: s32[10], new: bf16[10,8]) -> bf16[1000,8] {
  %pool = bf16[1000,8]{1,0} parameter(0)
  %at = s32[10]{0} parameter(1)
  %new = bf16[10,8]{1,0} parameter(2)
  ROOT %written = bf16[1000,8]{1,0} scatter(%pool, %at, %new), to_apply=%second
}

%fused_copy (param_0: bf16[8,16]) -> bf16[16,8] {
  %param_0.1 = bf16[8,16]{1,0} parameter(0)
  ROOT %turned = bf16[16,8]{1,0} transpose(%param_0.1), dimensions={1,0}
}

%fused_call (q: bf16[10,8], pages: bf16[1000,8]) -> f32[10,8] {
  %q = bf16[10,8]{1,0} parameter(0)
  %pages = bf16[1000,8]{1,0} parameter(1)
  ROOT %attend = f32[10,8]{1,0} custom-call(%q, %pages), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: f32[100,8], b: bf16[8,16], c: bf16[1000,8], d: s32[10]) -> (f32[10,8]) {
  %a = f32[100,8]{1,0} parameter(0), metadata={op_name="x"}
  %b = bf16[8,16]{1,0} parameter(1), metadata={op_name="params[\\'layers\\'][1][\\'wq\\']"}
  %c = bf16[1000,8]{1,0} parameter(2), metadata={op_name="cache"}
  %d = s32[10]{0} parameter(3), metadata={op_name="at"}
  %first = bf16[10,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_slice
  %write = bf16[1000,8]{1,0} fusion(%c, %d, %first), kind=kInput, calls=%fused_write
  %flat = bf16[128]{0} bitcast(%b)
  %turn = bf16[16,8]{1,0} fusion(%flat), kind=kLoop, calls=%fused_copy
  %call = f32[10,8]{1,0} fusion(%first, %write), kind=kCustom, calls=%fused_call
  %sum = f32[10,8]{1,0} all-reduce-start(%call), channel_id=1, to_apply=%add
  %done = f32[10,8]{1,0} all-reduce-done(%sum)
  %loop = (s32[], /*index=1*/f32[10,8]{1,0}) while(%done), condition=%c1, body=%b1
  ROOT %out = (f32[10,8]{1,0}) tuple(%done)
}
"""
POOL = 1000 * 8 * 2


@pytest.fixture(scope="module")
def program():
    return Program(TEXT)


def test_kernels_are_what_runs_in_the_order_of_the_schedule(program):
    kinds = {kernel.name: program.kind(kernel) for kernel in program.kernels()}
    assert list(kinds.items()) == [
        ("first", "elementwise"), ("write", "scatter"), ("turn", "transpose"),
        ("call", "mosaic_gpu_v2"), ("sum", "all-reduce"), ("loop", "while"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "read", "written", "pools"),
    [
        ("first", 10 * 8 * 4, 10 * 8 * 2, 0),  # of the sum, only the part that the slice keeps
        ("write", 10 * 4 + 10 * 8 * 2, 10 * 8 * 2, 0),  # in place
        ("turn", 8 * 16 * 2, 8 * 16 * 2, 0),
        ("call", 10 * 8 * 2, 10 * 8 * 4, 1),  # of the pool, only the rows that tables name
        ("sum", 10 * 8 * 4, 10 * 8 * 4, 0),
        ("loop", 0, 0, 0),
    ],
)
def test_traffic(program, name, read, written, pools):
    assert program.traffic(program.entry[name], POOL) == Traffic(read, written, pools)


def test_arguments_have_their_names_in_python(program):
    assert program.arguments(program.entry["turn"]) == ["params['layers'][1]['wq']"]
    assert program.arguments(program.entry["write"]) == ["cache", "at"]
    assert program.arguments(program.entry["call"]) == []


def test_a_tuple_is_as_large_as_all_in_it(program):
    assert program.entry["loop"].bytes == 4 + 10 * 8 * 4
