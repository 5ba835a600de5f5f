"""The functions of ``recbft.core``, faster: one folder per mechanism, a short reference beside every fast path."""
