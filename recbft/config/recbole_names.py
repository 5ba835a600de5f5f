"""RecBole's models by name: those that one of ours stands for, and what the others are, for the message."""

from __future__ import annotations

from typing import Any

from recbft.errors import UserError, did_you_mean

# RecBole's model -> ours and the arm that stands for it; a config may name another arm.
MODELS = {
    "SASRec": ("sasrec", "published"),
    "SASRecBFT": ("sasrec", "bft"),
    "BERT4Rec": ("bert4rec", "published"),
    "BERT4RecBFT": ("bert4rec", "bft"),
    "HSTU": ("hstu", "published"),
    "HSTUBFT": ("hstu", "bft"),
    "Pop": ("pop", None),
}
# What else RecBole 1.2.1 has, by what it reads.
GENERAL = """
    ADMMSLIM AsymKNN BPR CDAE ConvNCF DGCF DiffRec DMF EASE ENMF FISM GCMC ItemKNN LDiffRec LightGCN LINE MacridVAE
    MultiDAE MultiVAE NAIS NCEPLRec NCL NeuMF NGCF NNCF RaCT Random RecVAE SGL SimpleX SLIMElastic SpectralCF
""".split()  # noqa: SIM905  a table
FEATURES = """
    AFM AutoInt DCN DCNV2 DeepFM DSSM EulerNet FFM FiGNN FM FNN FwFM KD_DAGFM LR NFM PNN WideDeep xDeepFM DIN DIEN
    CFKG CKE KGAT KGCN KGIN KGNNLS KTUP MCCLK MKR RippleNet lightgbm xgboost
""".split()  # noqa: SIM905  a table
SEQUENTIAL = """
    Caser CORE FDSA FEARec FOSSIL FPMC GCSAN GRU4Rec GRU4RecCPR GRU4RecF GRU4RecKG HGN HRM KSR LightSANs NARM
    NextItNet NPE RepeatNet S3Rec SASRecCPR SASRecF SHAN SINE SRGNN STAMP TransRec
""".split()  # noqa: SIM905  a table
NAMES = (*MODELS, *GENERAL, *FEATURES, *SEQUENTIAL)


def ours_for(name: Any) -> dict[str, Any]:
    """The keys of recbft that a config's ``model`` stands for; it may be one of ours by our name.

    Raises:
        UserError: the model is not in recbft.
    """
    if name is None:
        return {}
    if not isinstance(name, str):
        raise UserError(f"model is {name!r}; give one name, such as SASRec")
    if name in MODELS:
        model, arm = MODELS[name]
        return {"model": model, **({"arm": arm} if arm is not None else {})}
    if name in [model for model, _ in MODELS.values()]:
        return {"model": name}
    kind = {**dict.fromkeys(GENERAL, "reads no order of events"), **dict.fromkeys(FEATURES, "reads features or graphs")}
    if name in kind:
        raise UserError(
            f"model {name!r} {kind[name]}; recbft has sequential models and Pop: choose one of {', '.join(MODELS)}"
        )
    if name in SEQUENTIAL:
        raise UserError(f"model {name!r} of RecBole is not in recbft; choose one of {', '.join(MODELS)}")
    raise UserError(f"model {name!r} is neither in recbft nor in RecBole; {did_you_mean(name, MODELS)}")
