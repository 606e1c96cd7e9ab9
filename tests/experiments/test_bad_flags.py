"""Bad flags of the programs that serve a model: each is refused before the weights are read, in one
line that names the fault and the allowed values."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.conftest import TINY
from tests.models import peft_folders

ROOT = Path(__file__).parents[2]
# The runner runs each program once for each list of arguments, as its command line would, without a
# new interpreter and new imports. Each program has a process of its own, as each defines its flags.
# The runner loads a tokenizer before it forks, for the imports.
RUNNER = """
import contextlib, gc, importlib, io, json, os, sys
import models
from absl import flags
from absl.testing import flagsaver

cases = json.load(sys.stdin)
modules = {name: importlib.import_module("experiments." + name) for name in cases}
models.load_tokenizer("bundled")
gc.freeze()  # otherwise each process would copy all objects to collect them at its end
for name, module in modules.items():
    child = os.fork()
    if child == 0:
        break
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(name)
else:
    sys.exit()
program = module.PROGRAM if hasattr(module, "PROGRAM") else module.STUDY.program
names = program.define()
flags.FLAGS(["program"])
defaults = flagsaver.save_flag_values()
for arguments in cases[name]:
    flagsaver.restore_flag_values(defaults)
    flags.FLAGS.unparse_flags()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            program.start(names, ["program", *arguments])
    except SystemExit as end:
        # A text is printed, and the exit status is 1.
        status, text = (1, end.code) if isinstance(end.code, str) else (end.code, said.getvalue())
        print(json.dumps([name, status, text]))
"""
NOT_POSITIVE = "is not a positive integer"
ENGINE = [
    ("--max_num_seqs=0", "max_num_seqs must be from 1 to 65536, not 0"),
    ("--max_num_seqs=many", "flag --max_num_seqs=many: invalid literal for int()"),
    (
        "--max_num_batched_tokens=512 --max_num_seqs=600",
        "max_num_batched_tokens (512) must be at least max_num_seqs (600)",
    ),
    ("--max_num_batched_tokens=31", "must be at least max_num_seqs (32)"),
    ("--max_prefills_per_step=0", "max_prefills_per_step must be from 1 to 65536, not 0"),
    ("--max_model_len=1", "max_model_len must be at least 2 and below 2^31, not 1"),
    (
        "--max_model_len=9999",
        "max_model_len (9999) exceeds the model's max_position_embeddings (1024)",
    ),
    ("--page_size=0", "page_size must be at least 1 and below 2^31, not 0"),
    ("--kv_cache_tokens=15", "kv_cache_tokens (15) must hold at least one page of 16 tokens"),
    ("--watermark=1", "watermark must be at least 0 and below 1, not 1.0"),
    ("--watermark=nan", "watermark must be a finite number, not nan"),
    (
        "--nochunked_prefill --max_num_batched_tokens=512",
        "without chunked prefill a whole sequence must fit a step",
    ),
    ("--chunked_prefill=perhaps", "Non-boolean argument to boolean flag"),
    ("--tensor_parallel=0", "tensor_parallel must be at least 1 and below 2^31, not 0"),
    ("--tensor_parallel=2", "tensor_parallel (2) needs as many devices; JAX sees 1"),
    ("--tensor_parallel=5", "tensor_parallel (5) must divide num_heads"),
    ("--preemption_mode=drop", "preemption_mode must be 'auto', 'recompute' or 'swap', not 'drop'"),
    ("--admit_after_swap=never", "admit_after_swap must be 'completed' or 'resumed', not 'never'"),
    ("--policy=orca_max --preemption_mode=swap", "policy 'orca_max' cannot swap a sequence"),
    ("--lserve_sink=64", "--lserve_sink is an option of --policy=lserve, not of --policy=vllm"),
    ("--policy=lserve --lserve_sink=100", "sink must be whole pages of 16, not 100"),
    ("--policy=diffkv --prefix_caching", "policy 'diffkv' cannot share prefixes"),
    ("--policy=nowhere:POLICY", "policy 'nowhere:POLICY': No module named 'nowhere'"),
    ("--policy=math:pi", "policy 'math:pi' is a float, not a Policy"),
    ("--policy=lserve --policy_options=[]", "--policy_options must be a JSON object, not []"),
    ("--policy=lserve --policy_options={", "must be a JSON object: Expecting property name"),
    (f"--policy=lserve --policy_options={'[' * 10**5}", "must be a JSON object: maximum recursion"),
    ('--policy=lserve --policy_options={"x":1}', "policy_options must be options of policy 'lse"),
    ('--policy=lserve --policy_options={"reuse":1,"reuse":2}', "a name is given twice in"),
    (
        '--policy=lserve --lserve_budget=64 --policy_options={"budget":48}',
        "--lserve_budget and --policy_options both give 'budget'",
    ),
    ("--policy=diffkv --diffkv_low=K3V3", "low: bits must be one of"),
    ("--policy=magic", "policy must be one of diffkv, fastertransformer, lserve"),
    ("--policy=orca_pow2 --prefix_caching", "policy 'orca_pow2' cannot share prefixes"),
    ("--policy=orca_max --kv_cache_tokens=512", "must hold max_model_len (1024) tokens"),
    ("--seed=-1", "-1 is not a non-negative integer"),
    (
        "--attention_implementation=mosaic_gpu",
        "pages must all be bfloat16 or all float16",
    ),
    ("--attention_implementation=cuda", "value should be one of <|reference|xla|mosaic_gpu>"),
    ("--dtype=int8", "value should be one of <float32|bfloat16|float16>"),
    ("--model=/no/such/model", "there is no folder /no/such/model, and it is no hub id"),
    ("--model=pyproject.toml", "pyproject.toml is a file; a model is a folder"),
    ("--model=tests", "tests/config.json is missing"),
    ("--output_dir=pyproject.toml", "--output_dir=pyproject.toml cannot be written to:"),
    ("--output_dir=/dev/null/x", "--output_dir=/dev/null/x cannot be written to:"),
    ("--output_dir=", "--output_dir must name a folder, not ''"),
    ("--max_num_seqs=1000000000", "max_num_seqs must be from 1 to 65536, not 1000000000"),
    ("--max_model_len=1000000000", "need tables of 136.0 GiB in the host's memory"),
    ("--kv_cache_tokens=2000000000", "exceed the places that an int32 can name"),
    ("--modle=x", "Unknown command line flag 'modle'"),
    ("--flagfile=/no/such/file", "Unable to open flagfile"),
    ("--flagfile=FOLDER/binary.flags", "codec can't decode byte 0xff"),
    ("model=x", "unexpected argument 'model=x': flags are --name=value"),
]
# workloads/test_workloads.py has further bad flags of a workload.
SERVE = [
    ("--workload=chat", "--workload must be prompts:FILE, sharegpt:FILE"),
    ("--workload=prompts", "--workload=prompts lacks its source"),
    ("--workload=prompts:/none", "there is no file '/none'"),
    ("--workload=tasks:juggle", "unknown task 'juggle'; known: needle"),
    ("--workload=sharegpt:pyproject.toml", "pyproject.toml:1, entry 0: not JSON"),
    ("--workload=trace:pyproject.toml", "expected TIMESTAMP,ContextTokens,GeneratedTokens or"),
    ("--workload=trace:pyproject.toml --request_rate=1", "use --time_scale, not --request_rate"),
    ("--workload=tasks:needle --context_length=8", "task 'needle' needs 256 tokens, not 8"),
    ("--request_rate=nan", "--request_rate must be positive or inf, not nan"),
    (
        "--workload=prompts:FOLDER/special.jsonl",
        "FOLDER/special.jsonl:2: stop string '</s>' is a special",
    ),
    ("--temperature=-1", "temperature must be 0 (greedy) or at least 1.18e-38, not -1.0"),
    ("--temperature=inf", "temperature must be a finite number, not inf"),
    ("--top_k=-1", "top_k must be at least 0"),
    ("--top_p=0", "top_p must be above 0 and at most 1, not 0.0"),
    ("--adapters=FOLDER/adapters", "adapters need adapter_slots, which is 0"),
]
EVALUATE = [
    ("--tasks=needle,juggle", "unknown task 'juggle'; allowed: needle"),
    ("--tasks=", "--tasks must name at least one"),
    ("--contexts=12", "contexts are token counts from 256 to max_model_len (1024), not 12"),
    ("--contexts=256,many", "flag --contexts=256,many: invalid literal"),
    ("--contexts=512 --max_model_len=400", "from 256 to max_model_len (400), not 512"),
    ("--num_prompts=0", "--num_prompts must be from 1 to 10000, not 0"),
    ("--compare_with=/none", "/none: cannot be read: No such file"),
    (
        "--compare_with=pyproject.toml",
        "pyproject.toml:1: has columns [build-system]; expected task",
    ),
]
CONCENTRATION = [
    ("--tasks=juggle", "unknown task 'juggle'"),
    ("--tasks=", "--tasks must name at least one"),
    ("--context_length=8 --tasks=needle", "task 'needle' needs 256 tokens, not 8"),
    ("--num_prompts=0", "--num_prompts must be at least 1, not 0"),
    ("--output_dir=pyproject.toml", "--output_dir=pyproject.toml cannot be written to:"),
    ("--model=tests", "tests has no tokenizer.json"),
    ("needle", "unexpected argument 'needle': flags are --name=value"),
]
QUALIFY = [
    ("--tasks=needle,juggle", "unknown task 'juggle'; allowed: needle"),
    ("--contexts=12", "contexts are token counts from 256"),
    ("--contexts=many", "flag --contexts=many: invalid literal"),
    ("--spread_context=2048", "a context is at most the model's 1024 positions, not 2048"),
    ("--tasks=cot_long --spread_context=256 --contexts=512", "no task fits --spread_context"),
    ("--spread_context=512", "FOLDER/duo_gates.json: No such file or directory"),
    (
        "--spread_context=512 --gates=pyproject.toml",
        "error: pyproject.toml: could not convert string",
    ),
]
SAVINGS = [
    ("--sequences=2,many", "flag --sequences=2,many: invalid literal"),
    ("--kv_cache_tokens=32", "leave 0 tokens for each sequence of a request: too few"),
]
MEMORY_MAP = [
    ("--requests=plain,tree", "may be plain, prefix, parallelN and beamN, not 'tree'"),
    ("--requests=parallel0", "n must be from 1 to 65536, not 0"),
    ("--requests=", "--requests must name at least one"),
    ("--prefix_tokens=44", "(44) must be above 0 and below --prompt_tokens (44)"),
    ("--policy=lserve --noprefix_caching --page_size=16", "--policy must be vllm, not"),
    ("--kv_cache_tokens=320", "4 times a prompt of 44 tokens and 48 to generate exceed the cache"),
]
SOAK = [
    ("--minutes=nan", "minutes must be a finite number, not nan"),
    ("--minutes=inf", "minutes must be a finite number, not inf"),
    ("--minutes=-1", "--minutes must be at least 0.01, not -1.0"),
    ("--check_share=nan", "check_share must be a finite number, not nan"),
]
RACE = [("--page_size=0", "page_size must be at least 1 and below 2^31, not 0")]
CLUSTER = [
    # This case comes first, because it counts JAX's devices anew.
    (
        "--runners=threads --num_gpus=1 --attention_implementation=mosaic_gpu",
        "pages must all be bfloat16 or all float16",
    ),
    ("--num_gpus=0", "--num_gpus must be at least 1, not 0"),
    ("--duration_s=nan", "duration_s must be a finite number, not nan"),
    ("--duration_s=1 --peak_rate=0.001", "--peak_rate=0.001 over --duration_s=1.0 is no request"),
    ("--tensor_parallel=2", "--tensor_parallel: each engine of a cluster has one device"),
]
CASES = {
    "soak.__main__": SOAK,
    "bench.vs_transformers": RACE,
    "papers.vllm.fig15_sharing_savings": SAVINGS,
    "papers.vllm.memory_map": MEMORY_MAP,
    "papers.lserve.attention_concentration": CONCENTRATION,
    "serve": SERVE + ENGINE,
    "serve_cluster": CLUSTER,
    "evaluate": EVALUATE,
    "qualify": QUALIFY,
}


@pytest.fixture(scope="module")
def said(tiny_folder, tmp_path_factory):
    """(exit status, text) of each program for each case, in the order of CASES."""
    folder = tmp_path_factory.mktemp("no_weights")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    prompts = [{"prompt": "a"}, {"prompt": "b", "stop": "</s>"}]
    (folder / "special.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    peft_folders.write(folder / "adapters" / "a0", TINY)
    (folder / "binary.flags").write_bytes(b"--model=\xff\n")
    arguments = {}
    for program, cases in CASES.items():
        good = [f"--model={folder}"] * (program != "bench.vs_transformers")
        good += ["--contexts=256", "--num_prompts=1"] * (program in ("evaluate", "qualify"))
        arguments[program] = [
            [*good, *flag.replace("FOLDER", str(folder)).split()] for flag, _ in cases
        ]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER], input=json.dumps(arguments), cwd=ROOT, text=True,
        capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    # Any exception but SystemExit ends the runner with a traceback.
    assert done.returncode == 0, done.stderr
    said: dict[str, list] = {program: [] for program in CASES}
    for line in done.stdout.replace(str(folder), "FOLDER").splitlines():
        program, *told = json.loads(line)
        said[program].append(told)
    assert {program: len(each) for program, each in said.items()} == {
        program: len(cases) for program, cases in CASES.items()
    }
    return said


@pytest.mark.parametrize(
    "program, case, flag, complaint",
    [(program, i, *case) for program, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_a_bad_flag_is_told_in_a_line(said, program, case, flag, complaint):
    status, text = said[program][case]
    assert status == 1
    told = [line for line in text.splitlines() if complaint in line]
    assert len(told) == 1, text
    assert "Traceback" not in text and "safetensors" not in text
