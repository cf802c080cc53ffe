"""What tasks check of their configs and files."""

from pathlib import Path

from ml_collections import ConfigDict

from experiments.common.failures import RunError


def read_file(path: str, at_least: int = 0, key: str = "config.data.path") -> bytes:
    """Return the bytes of a file that the user names by a key of the config."""
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise RunError(f"{key} must be a file, got {path:.300}: {error.strerror}") from None
    if len(data) < at_least:
        raise RunError(f"{path} must hold at least {at_least} bytes, got {len(data)}; give more")
    return data


def check_size(key: str, value: int, most: int, of: str) -> None:
    """Check that the value of a key is in 1 … most, a number described by `of`."""
    if not 1 <= value <= most:
        raise RunError(f"{key} must be in 1 … {of}={most}, got {value}; try {max(1, most // 4)}")


def read_remat(model: ConfigDict) -> bool | tuple[str, ...]:
    """Return a block's `remat` for `config.model.remat`, such as "z,lse"."""
    value = model.remat
    return value if isinstance(value, bool) else tuple(value.split(","))
