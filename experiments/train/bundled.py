"""Train a small Qwen3-style decoder on the tasks of `experiments.tasks.tasks`.

By default the program trains 'bundled', the model of demos and of tests for equal tokens. With the
flag file below it trains 'judge', for studies of sparsity and compression, which has 64 KV heads.
Two CPU cores suffice. The same command resumes a stopped run. `training.json` in a
model's folder holds the options and the log of its training.

    python -m experiments.train.bundled --output_dir=results/bundled
    python -m experiments.train.bundled --flagfile=configs/judge_training.flags
"""

from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.lib import program, run_record
from experiments.lib.typed_flags import Flags, Output, flag
from experiments.train import build_tokenizer
from experiments.train.trainer import Options, Trainer
from models import checkpoint
from models.config import ModelConfig

CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=512,
    max_position_embeddings=8192,
    rope_theta=5e5,
    qk_norm=True,
    bos_token_id=build_tokenizer.BOS,
    eos_token_ids=(build_tokenizer.EOS,),
)
SHAPE = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
)  # fmt: skip
OF_MODEL = "of the model"
OPTIONS = Options(
    tokens=17.6e6,
    lengths="0:128=1;1334500:256=.75,128=.25;5652000:512=.4,256=.6"
    ";10048000:1024=.45,512=.3,256=.25;11618000:2048=.25,1024=.4,512=.2,256=.15"
    ";14444000:4096=.12,2048=.3,1024=.35,512=.13,256=.1",
    mix="0:needles=.22,chain=.10,values=.18,count=.10,vote=.12,cot=.22,copy=.04,story=.02"
    ";2904500:needles=.09,chain=.06,values=.28,count=.31,vote=.07,cot=.15,copy=.005,story=.035"
    ";5652000:needles=.10,chain=.06,values=.20,count=.34,vote=.06,cot=.20,copy=.005,story=.035"
    ";11618000:needles=.09,chain=.06,values=.19,count=.28,vote=.06,cot=.28,copy=.005,story=.035"
    ";14600000:needles=.06,chain=.05,values=.22,count=.30,vote=.05,cot=.29,copy=.005,story=.025",
    rates="0:1;9420000:1;14600000:.17515924;15600000:.17515924;17600000:.01",
    jump_from=5652000,
)


@dataclass(frozen=True)
class BundledFlags(Flags):
    hidden_size: int = flag(CONFIG.hidden_size, OF_MODEL, least=1)
    intermediate_size: int = flag(CONFIG.intermediate_size, OF_MODEL, least=1)
    num_layers: int = flag(CONFIG.num_layers, OF_MODEL, least=1)
    num_heads: int = flag(CONFIG.num_heads, OF_MODEL, least=1)
    num_kv_heads: int = flag(CONFIG.num_kv_heads, OF_MODEL, least=1)
    head_dim: int = flag(CONFIG.head_dim, OF_MODEL, least=1)
    minutes: float = flag(0.0, "stop (resumably) after this long; 0: no limit", least=0)
    checkpoint_seconds: float = flag(120.0, "time between checkpoints", least=0)
    evaluate_every: float = flag(1e6, "tokens between held-out evaluations", least=1)
    evaluation_prompts: int = flag(16, "per task and length in those evaluations", least=1)
    training: Options = OPTIONS

    @property
    def config(self) -> ModelConfig:
        """The model's configuration. Raises ValueError for an invalid shape."""
        return CONFIG.replace(**{name: getattr(self, name) for name in SHAPE})


def export(folder: Path, config: ModelConfig, p) -> None:
    """Write the Hugging Face folder. Weights are float16: 3 more mantissa bits than bfloat16."""
    checkpoint.save(folder, config, p, dtype="float16")
    generation = dict(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_ids[0],
        pad_token_id=build_tokenizer.PAD,
        do_sample=False,
    )
    run_record.write_json(folder, "generation_config.json", generation)
    build_tokenizer.build(folder)


def main(flags: BundledFlags, output: Output) -> None:
    folder = output.folder
    with program.refusals():
        config = flags.config
        trainer = Trainer(config, flags.training, folder)
    count = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(f"{count:,} parameters, from step {trainer.step}")
    trainer.run(
        flags.minutes, flags.checkpoint_seconds, flags.evaluate_every, flags.evaluation_prompts
    )
    export(folder / "model", config, trainer.params)
    exact = trainer.evaluate([256, 512, 1024, 2048, 4096], 2 * flags.evaluation_prompts)
    report = dict(
        phases=[row for row in trainer.log if "options" in row],
        tokens=trainer.tokens,
        steps=trainer.step,
        seconds=round(trainer.seconds),
        exact_match_teacher_forced=exact,
        environment=run_record.describe_environment(),
        log=[row for row in trainer.log if "options" not in row],
    )
    run_record.write_json(folder / "model", "training.json", report)
    numbers: dict[str, float] = dict(tokens=trainer.tokens, steps=trainer.step)
    for setting, share in exact.items():
        numbers["exact_teacher_forced_" + setting.replace("@", "_")] = share
    run_record.write_summary(folder, numbers)


PROGRAM = program.Program(main, BundledFlags, Output("results/bundled"))

if __name__ == "__main__":
    PROGRAM.run()
