"""Models of strangers: their attention layers are made in setup and in compact methods."""

from typing import Any

import flax.linen as nn
import jax

import flax_mha


class Made(nn.Module):
    """Layers of a class in `@nn.compact`, one under a name, and under `nn.remat`."""

    attention: Any = flax_mha.MultiHeadDotProductAttention

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(9, 8)(tokens)
        x = x + self.attention(2)(x)
        x = x + nn.remat(self.attention)(4, name="second")(x, x)
        return nn.Dense(3)(x)


class InSetup(nn.Module):
    """Layers in `setup`, in a list, which a method of another name calls."""

    attention: Any = flax_mha.MultiHeadDotProductAttention

    def setup(self) -> None:
        self.embed = nn.Embed(9, 8)
        self.layers = [self.attention(2), self.attention(4)]

    def run(self, tokens: Any) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x

    def __call__(self, tokens: Any) -> jax.Array:
        return self.run(tokens)


class Scanned(nn.Module):
    """A layer under `nn.scan`."""

    attention: Any = flax_mha.MultiHeadDotProductAttention

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(9, 8)(tokens)

        def body(layer: Any, x: Any, _: Any) -> Any:
            return x + layer(x), None

        scan = nn.scan(
            body, {"params": 0, "intermediates": 0, "edits": 0}, split_rngs={"params": True},
            length=2,
        )  # fmt: skip
        return scan(self.attention(2, name="layer"), x, None)[0]


PATHS = {
    Made: ["MultiHeadDotProductAttention_0", "second"],
    InSetup: ["layers_0", "layers_1"],
    Scanned: ["layer"],
}
