"""Falcon Mamba (TII 2024, arXiv 2410.05355): Mamba, whose steps, B and C are normalised."""

from dataclasses import dataclass

from megacore.models.families.mamba import MambaConfig


@dataclass(frozen=True, kw_only=True)
class FalconMambaConfig(MambaConfig):
    family = "falcon_mamba"
    architecture = "FalconMambaForCausalLM"
    harmless = MambaConfig.harmless | {"use_falcon_mambapy"}
    constants = {"plain_norms": frozenset({"ssm.dt_norm", "ssm.b_norm", "ssm.c_norm"})}
    told = {"latent_norm_eps": "mixer_rms_eps"}

    mixer_rms_eps: float = 1e-6


PRESETS = {
    "falcon_mamba-tiny": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4},
    "falcon-mamba-7b": {
        "vocab_size": 65024,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
    },
}
