"""Train a small Qwen3-style decoder on the tasks of `experiments.tasks.tasks`.

By default the bundled model, for demos and identity; with the flag file, the one that judges
sparsity and compression, which has 64 KV heads. Two CPU cores suffice. The same command resumes a
run that was stopped. `training.json` in a model's folder holds the options and the log of its
weights.

    python -m experiments.train.bundled --output_dir=results/bundled
    python -m experiments.train.bundled --flagfile=configs/judge_training.flags
"""

from pathlib import Path

import jax
from absl import flags

from experiments.lib import program, run_record
from experiments.lib.flags import define_fields, define_float, fields_of
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
SHAPE = (
    "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
)  # fmt: skip


def config_of(options: program.Options) -> ModelConfig:
    """Raises ValueError for a shape that cannot be."""
    return CONFIG.replace(**{name: getattr(options, name) for name in SHAPE})


def define_flags() -> None:
    define_fields(OPTIONS)
    for name in SHAPE:
        flags.DEFINE_integer(name, getattr(CONFIG, name), "of the model", lower_bound=1)
    define_float("minutes", 0.0, "stop (resumably) after this long; 0: no limit", 0)
    define_float("checkpoint_seconds", 120.0, "time between checkpoints", 0)
    define_float("evaluate_every", 1e6, "tokens between held-out evaluations", 1)
    flags.DEFINE_integer("evaluation_prompts", 16, "per task and length in those evaluations", 1)


def export(folder: Path, config: ModelConfig, p) -> None:
    """Write the Hugging Face folder. float16 keeps 3 bits more than bfloat16 of such weights."""
    checkpoint.save(folder, config, p, dtype="float16")
    generation = dict(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_ids[0],
        pad_token_id=build_tokenizer.PAD,
        do_sample=False,
    )
    run_record.write_json(folder, "generation_config.json", generation)
    build_tokenizer.build(folder)


def main(options: program.Options) -> None:
    folder = Path(options.output_dir)
    with program.refusals():
        trained_by = Options(**fields_of(Options, options))
        config = config_of(options)
        trainer = Trainer(config, trained_by, folder)
    count = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(f"{count:,} parameters, from step {trainer.step}")
    trainer.run(
        options.minutes,
        options.checkpoint_seconds,
        options.evaluate_every,
        options.evaluation_prompts,
    )
    export(folder / "model", config, trainer.params)
    exact = trainer.evaluate([256, 512, 1024, 2048, 4096], 2 * options.evaluation_prompts)
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


PROGRAM = program.Program(
    main,
    define_flags,
    "results/bundled",
    output_help="checkpoint and Hugging Face folder",
)

if __name__ == "__main__":
    PROGRAM.run()
