"""Train the bundled model: a small Qwen3-style decoder, on the tasks of `experiments.tasks`.

Two CPU cores suffice. The same command resumes a run that was stopped.
`models/bundled/training.json` holds the options and the log of the committed weights.

    python -m experiments.train_bundled --output_dir=results/bundled
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
from absl import app, flags

from experiments import build_tokenizer, results
from experiments.training import Options, Trainer
from models import weights
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
    stages="0:128=1;0.14:256=.8,128=.2;0.38:512=.5,256=.5;0.66:1024=.45,512=.3,256=.25"
    ";0.88:2048=.3,1024=.4,256=.3",
    mix="needles=.20,chain=.12,values=.19,count=.12,vote=.13,cot=.20,copy=.01,story=.03",
)
OPTION_HELP = {
    "tokens": "budget; the schedule is a function of the share that is spent",
    "stages": "share of the budget:length=probability,...;...",
    "mix": "training task=probability,...",
    "batch_tokens": "tokens of a step (half as many below length 256)",
    "muon_lr": "learning rate of matrices",
    "adam_lr": "learning rate of all other parameters",
    "decay": "last share of the budget, in which the rates fall linearly",
    "max_position": "positions jump up to here, so that retrieval carries this far",
    "jump_from": "share of the budget at which jumps begin",
    "seed": "of weights and data",
    "corpus_characters": "of filler text",
}
FLAGS = flags.FLAGS


def define_flags() -> None:
    for name, text in OPTION_HELP.items():
        value = getattr(OPTIONS, name)
        if isinstance(value, str):
            flags.DEFINE_string(name, value, text)
        elif isinstance(value, int):
            flags.DEFINE_integer(name, value, text)
        else:
            flags.DEFINE_float(name, value, text)
    flags.DEFINE_string("output_dir", "results/bundled", "checkpoint and Hugging Face folder")
    flags.DEFINE_float("minutes", 0.0, "stop (resumably) after this long; 0: no limit")
    flags.DEFINE_float("checkpoint_seconds", 120.0, "time between checkpoints")
    flags.DEFINE_float("evaluate_every", 1e6, "tokens between held-out evaluations")
    flags.DEFINE_integer("evaluation_prompts", 16, "per task and length in those evaluations")


def export(folder: Path, config: ModelConfig, p) -> None:
    """Write the Hugging Face folder. float16 keeps 3 bits more than bfloat16 of such weights."""
    weights.save(folder, config, p, dtype="float16")
    generation = dict(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_ids[0],
        pad_token_id=build_tokenizer.PAD,
        do_sample=False,
    )
    results.write_json(folder, "generation_config.json", generation)
    build_tokenizer.build(folder)


def main(_) -> None:
    given: dict[str, Any] = {name: FLAGS[name].value for name in OPTION_HELP}
    options = replace(OPTIONS, **given)
    folder = Path(FLAGS.output_dir)
    trainer = Trainer(CONFIG, options, folder)
    count = sum(x.size for x in jax.tree.leaves(trainer.params))
    print(f"{count:,} parameters, from step {trainer.step}")
    trainer.run(
        FLAGS.minutes, FLAGS.checkpoint_seconds, FLAGS.evaluate_every, FLAGS.evaluation_prompts
    )
    exact = trainer.evaluate([256, 512, 1024, 2048, 4096], 2 * FLAGS.evaluation_prompts)
    export(folder / "model", CONFIG, trainer.params)
    report = dict(
        options=asdict(options),
        tokens=trainer.tokens,
        steps=trainer.step,
        seconds=round(trainer.seconds),
        exact_match_teacher_forced=exact,
        environment=results.describe_environment(),
        log=trainer.log,
    )
    results.write_json(folder / "model", "training.json", report)


if __name__ == "__main__":
    define_flags()
    app.run(main)
