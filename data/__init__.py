"""Data set cards, one YAML file each; read by ``recbft.datasets.cards``. No data lies here."""
