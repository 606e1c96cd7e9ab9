"""Text generation of a 70B model on eight GPUs for many LoRA tenants (Punica Fig. 12), in simulated
time.

    python -m experiments.papers.punica.fig12_text_generation_70b

The setting is `fig11_text_generation`'s, with Megatron's tensor parallelism.
"""

from experiments.papers.punica import text_generation

APART = (21.0, 25.0)

STUDY = text_generation.study(
    __file__,
    ("punica", "vllm"),
    {"70b": (441.0, 446.0)},
    title="Text generation of a 70B model for many LoRA tenants (Punica Fig. 12)",
    claim="Punica generates 441 to 446 tokens/s whatever the popularity, vLLM 21 to 25 unless all "
    "requests are of one adapter",
    here="Llama-2-70B, eight A100-40",
    differs="the growth of the host's time with the GPUs is fitted to vLLM's rate in this figure",
    paper={f"70b_vllm_{p}": APART for p in ("distinct", "uniform", "skewed")}
    | {"70b_vllm_identical": 457.0},
    minutes=(1, 9),
    size=(6, 3.8),
)

if __name__ == "__main__":
    STUDY.run()
