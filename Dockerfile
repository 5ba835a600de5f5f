# A service of a run folder, which is mounted:
#
#   docker build -t recbft .
#   docker run -p 8000:8000 -v $PWD/runs:/runs:ro recbft /runs/current
FROM python:3.12-slim

# The kernels are compiled here, and looked up later by the compiler's version: gcc stays.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/recbft
COPY constraints.txt ./
# --build-arg TORCH_INDEX=ADDRESS looks for PyTorch in one more index, such as that of its smaller builds for CPUs.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY recbft recbft
COPY cli cli
COPY configs configs
COPY data data
RUN pip install --no-cache-dir -c constraints.txt '.[serve]'

ENV XDG_CACHE_HOME=/var/cache
RUN python -c 'import sys; from recbft.kernels import c_library; sys.exit(c_library.missing())' \
    && useradd --system --no-create-home recbft
USER recbft

EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://localhost:8000/healthz', timeout=5)"]
ENTRYPOINT ["recbft", "serve", "--host", "0.0.0.0"]
CMD ["/runs/current"]
