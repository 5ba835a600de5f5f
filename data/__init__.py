"""Data set cards, one YAML file each; read by ``recbft.datasets.loading``. No data lies here."""
