"""The judge of `make check-gpu`: every fault it names, on programs and reports written by hand."""

import dataclasses
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import gpu_report  # noqa: E402
import hlo  # noqa: E402
import ptx  # noqa: E402

KERNEL = (
    '  %call.{i} = f32[4,8]{{1,0}} custom-call(%k, %v), custom_call_target="__gpu$xla.gpu.triton", '
    'backend_config={{name = "tree_attention_kernel", grid_x = 1 : i32}}, '
    'metadata={{op_name="jit(round)/pallas_call"}}'
)
STEP = """\
HloModule jit_finish, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), \
{1}: (1, {}, must-alias) }, entry_computation_layout={(bf16[1,64,2,16])->bf16[1,64,2,16]}

%in_place (p0: bf16[1,64,2,16], p1: bf16[1,4,2,16], p2: s32[]) -> bf16[1,64,2,16] {
  %p0 = bf16[1,64,2,16]{3,2,1,0} parameter(0)
  %p1 = bf16[1,4,2,16]{3,2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = bf16[1,64,2,16]{3,2,1,0} dynamic-update-slice(%p0, %p1, %zero, %p2, %zero, %zero)
}

%body (arg: (bf16[1,64,2,16], bf16[1,64,2,16], s32[])) -> (bf16[1,64,2,16], /*index=1*/s32[]) {
  %arg = (bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0}, /*index=2*/s32[]) parameter(0)
  %k = bf16[1,64,2,16]{3,2,1,0} get-tuple-element(%arg), index=0
  %v = bf16[1,64,2,16]{3,2,1,0} get-tuple-element(%arg), index=1
  %n = s32[] get-tuple-element(%arg), index=2
  %rows = bf16[1,4,2,16]{3,2,1,0} slice(%v), slice={[0:1], [0:4], [0:2], [0:16]}
  %write = bf16[1,64,2,16]{3,2,1,0} fusion(%k, %rows, %n), kind=kLoop, calls=%in_place
INSERT
  ROOT %out = (bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0}, s32[]) tuple(%write, %v, %n)
}

%condition (arg.1: (bf16[1,64,2,16], bf16[1,64,2,16], s32[])) -> pred[] {
  %arg.1 = (bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0}, s32[]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: bf16[1,64,2,16], b: bf16[1,64,2,16]) -> bf16[1,64,2,16] {
  %a = bf16[1,64,2,16]{3,2,1,0} parameter(0)
  %b = bf16[1,64,2,16]{3,2,1,0} parameter(1)
  %start = s32[] constant(0)
  %init = (bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0}, s32[]) tuple(%a, %b, %start)
  %loop = (bf16[1,64,2,16]{3,2,1,0}, bf16[1,64,2,16]{3,2,1,0}, s32[]) while(%init), \
condition=%condition, body=%body
  ROOT %result = bf16[1,64,2,16]{3,2,1,0} get-tuple-element(%loop), index=0
}
"""
TWO = "\n".join(KERNEL.format(i=i) for i in range(2))
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tree_attention_kernel' for 'sm_90a'
ptxas info    : Function properties for tree_attention_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 154 registers, used 1 barriers, 24576 bytes smem
ptxas info    : Compiling entry function 'loop_add_fusion' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion
    24 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
THUNKS = """\
001: kWhile [source | sink]
condition:
    002: kCustomKernel [source | sink] wrapped_not grid: [1, 1, 1] threads: [1, 1, 1]  \
shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source | sink]
        003: kCustomKernel [source | sink] tree_attention_kernel grid: [8, 1, 16] \
threads: [128, 1, 1]  shared_memory: 24576 bytes
        004: kCopy         [prev=003 (1) | sink] kCopy
        005: kCustomKernel [source | sink] tree_attention_kernel__1 grid: [4, 1, 2] \
threads: [256, 1, 1]  shared_memory: 20480 bytes
    006: kCustomKernel [source | sink] sort_9 grid: [1, 1, 1] threads: [4, 1, 1]  \
shared_memory: 0 bytes
"""
GOOD = ptx.Kernel("tree_attention_kernel", 154, 0, 0, 24576)


def row(inserted=TWO, kernels=(GOOD,), temporaries=10, text=STEP, thunks=THUNKS, **changes):
    values = {
        "kernel": "tree_attention_kernel",
        "calls": 2,
        "cache": frozenset({2048}),
        "weights": frozenset({4096}),
        "batch": 1,
        "slots": 64,
        "budget": 100,
        "donated": 2,
    }
    module = hlo.parse(text.replace("INSERT", inserted))
    expected = gpu_report.Expected(**(values | changes))
    return gpu_report.examine("step", module, kernels, thunks, temporaries, expected)


def codes(*args, **changes) -> list[str]:
    return [fault.code for fault in row(*args, **changes).faults]


def test_a_step_without_faults():
    found = row()
    assert found.faults == []
    assert (found.calls, found.copies, found.registers, found.shared) == (2, 0, 154, 24576)
    assert (found.launches, found.graphs, found.blocks) == (4, 1, 128)
    assert found.collectives == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "%c = bf16[1,64,2,16]{3,2,1,0} copy(%k)",
            "cache-sized bf16[1,64,2,16] written by copy c",
        ),
        ("%c = bf16[1,2,64,16]{3,2,1,0} transpose(%k), dimensions={0,2,1,3}", "cache-sized bf16"),
        ("%c = f32[1,64,2,16]{3,2,1,0} convert(%k)", "cache-sized f32[1,64,2,16]"),
        ("%c = f32[64,64]{1,0} convert(%k)", "weight-sized f32[64,64] written by convert c"),
        ("%c = bf16[4096]{0} all-gather(%k), dimensions={0}", "weight-sized bf16[4096]"),
    ],
)
def test_copies_of_a_cache_or_a_weight_in_the_loop(line, message):
    found = row(f"{TWO}\n  {line}")
    assert [fault.code for fault in found.faults] == ["COPY"]
    assert message in found.faults[0].message


def test_a_fusion_that_writes_the_whole_cache_is_a_copy_and_one_in_place_is_none():
    inside = STEP.replace("dynamic-update-slice(%p0,", "add(%p0,")
    assert codes(text=inside) == ["COPY"]
    of_a_copy = STEP.replace(
        "  ROOT %dus = bf16[1,64,2,16]{3,2,1,0} dynamic-update-slice(%p0,",
        "  %neg = bf16[1,64,2,16]{3,2,1,0} negate(%p0)\n"
        "  ROOT %dus = bf16[1,64,2,16]{3,2,1,0} dynamic-update-slice(%neg,",
    )
    assert codes(text=of_a_copy) == ["COPY"]


def test_a_copy_outside_the_loop_or_of_another_size_is_none():
    outside = STEP.replace("%start =", "%early = bf16[1,64,2,16]{3,2,1,0} copy(%a)\n  %start =")
    assert codes(text=outside) == []
    assert codes(f"{TWO}\n  %c = bf16[1,63,2,16]{{3,2,1,0}} copy(%k)") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%m = pred[1,4,64]{2,1,0} compare(%k, %k), direction=LT", ["MASK"]),
        ("%m = s32[4,64]{1,0} iota(), iota_dimension=1", ["MASK"]),
        ("%m = s32[1,64]{1,0} iota(), iota_dimension=1", []),
        ("%m = f32[4,64]{1,0} exponential(%k)", []),
        ("%m = pred[4,32]{1,0} compare(%k, %k), direction=LT", []),
        ('%h = s32[] custom-call(%n), custom_call_target="xla_ffi_python_gpu_callback"', ["HOST"]),
        ("%h = (f32[4]{0}, u32[], token[]) send(%n, %n), channel_id=1", ["HOST"]),
    ],
)
def test_masks_and_host_calls(line, expected):
    assert codes(f"{TWO}\n  {line}") == expected


def test_a_mask_within_a_fusion_counts():
    hidden = STEP.replace(
        "  %zero = s32[] constant(0)\n",
        "  %zero = s32[] constant(0)\n  %seen = pred[1,4,64]{2,1,0} broadcast(%zero)\n",
    )
    assert codes(text=hidden) == ["MASK"]


def test_the_kernel_must_run_once_per_layer_and_forward():
    found = row(KERNEL.format(i=0))
    assert [str(fault) for fault in found.faults] == [
        "KERNEL: tree_attention_kernel is called 1 times, not 2"
    ]
    assert codes(TWO.replace("tree_attention_kernel", "another_kernel")) == ["KERNEL"]
    assert codes(TWO.replace("__gpu$xla.gpu.triton", "__cublas$gemm")) == ["KERNEL"]
    other = KERNEL.format(i=2).replace('name = "', 'ir = "at tree_attention_kernel.py", name = "a_')
    assert codes(f"{TWO}\n{other}") == []


APPEND = KERNEL.replace("tree_attention_kernel", "append_rows_kernel")


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_the_kernels_of_the_cache_are_counted_too(times):
    inside = "\n".join([TWO, *(APPEND.format(i=2 + i) for i in range(times))])
    others = {"append_rows_kernel": 2, "keep_rows_kernel": 0}
    found = [str(fault) for fault in row(inside, others=others).faults]
    wrong = [f"KERNEL: append_rows_kernel is called {times} times, not 2"] * (times != 2)
    assert found == wrong
    found = [str(fault) for fault in row(inside, others=others | {"keep_rows_kernel": 1}).faults]
    assert found == [*wrong, "KERNEL: keep_rows_kernel is called 0 times, not 1"]


def test_temporaries_and_donation():
    assert codes(temporaries=101) == ["TEMPORARIES"]
    assert codes(temporaries=100) == []
    assert codes(donated=3) == ["DONATION"]
    assert codes(text=STEP.replace("input_output_alias", "no_alias")) == ["DONATION"]


def test_the_assembler_report():
    kernels = ptx.parse(REPORT)
    assert kernels == [GOOD, ptx.Kernel("loop_add_fusion", 255, 16, 8, 0)]
    assert codes(kernels=kernels) == ["SPILLS"]
    with pytest.raises(ValueError, match="no registers reported for tree_attention_kernel"):
        ptx.parse(REPORT.replace("Used 154 registers", "?"))


TMA = """
.visible .entry tree_attention_kernel(
  mov.b32 \t%r1, 0;
  and.b32 \t%r2, %r4, 7;
  @%p4 cp.async.bulk.tensor.5d.shared::cluster.global [%r9], [%rd2, {%r1,%r1,%r1,%r3,%r5} ], [%r7];
  @%p4 cp.async.bulk.tensor.5d.shared::cta.global [%r9], [%rd2, {%r1,ROW,%r1,%r3,%r5}], [%r7];
.visible .entry another(
  @%p4 cp.async.bulk.tensor.5d.shared::cta.global [%r9], [%rd2, {%r1,%r2,%r1,%r3,%r5}], [%r7];
"""


@pytest.mark.parametrize(
    ("row", "count"), [("%r1", 0), ("0", 0), ("%r2", 1), ("8", 1), ("%r6", 1), ("%r3", 1)]
)
def test_a_copy_that_starts_within_a_tile(row, count):
    text = TMA.replace("ROW", row).replace("and.b32", "mov.b32 \t%r3, %r2;\n  and.b32")
    assert ptx.tma_copies(text, GOOD.name) == {"tma": 2, "within_tiles": count}
    kernel = dataclasses.replace(GOOD, tma=2, within_tiles=count)
    assert codes(kernels=[kernel], tma=True) == ["TILES"] * count
    assert codes(kernels=[GOOD], tma=True) == ["TILES"]  # not spelled as looked for
    with pytest.raises(ValueError, match="no kernel tree in this PTX"):
        ptx.tma_copies(text, "tree")


def test_what_xla_will_launch():
    assert codes(thunks=THUNKS.replace("20480", "232448")) == []
    assert codes(thunks=THUNKS.replace("20480", "232449")) == ["SHARED"]
    found, graphs = ptx.launches(THUNKS)
    assert graphs == 1
    assert [(launch.name, launch.graphed) for launch in found] == [
        ("wrapped_not", False),
        ("tree_attention_kernel", True),
        ("tree_attention_kernel__1", True),
        ("sort_9", False),
    ]


def test_the_kernels_own_results_are_no_copy():
    partial = TWO.replace("f32[4,8]{1,0} custom-call", "f32[64,64]{1,0} custom-call")
    assert codes(partial) == []
    assert codes(partial.replace("tree_attention_kernel", "another")) == ["COPY", "COPY", "KERNEL"]


def test_a_padded_copy_is_one_too():
    assert codes(f"{TWO}\n  %c = bf16[2,1060]{{1,0}} pad(%k)") == ["COPY"]


def test_collectives_are_counted_by_kind_and_bytes():
    lines = """
  %r = f32[4,8]{1,0} all-reduce(%n), to_apply=%condition
  %s = (bf16[8]{0}, bf16[16]{0}) all-gather-start(%n), dimensions={0}
  %d = bf16[16]{0} all-gather-done(%s)"""
    found = row(TWO + lines)
    assert found.collectives == {"all-reduce": 1, "all-gather": 1}
    assert found.collective_bytes == 4 * 8 * 4 + 16 * 2


def test_extrapolation_is_straight():
    shallow, deep = row(temporaries=10), row(temporaries=16)
    shallow.calls, deep.calls = 5, 7
    grown = gpu_report.extrapolate(shallow, deep, (2, 4), 32)
    assert grown["temporaries"] == 10 + 3 * 30
    assert grown["calls"] == 35


def test_text_that_is_not_hlo():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("module @jit {}")
