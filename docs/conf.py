"""The site: `python -m sphinx -W --keep-going docs build/site`, with the extra `docs`.

Pages are Markdown that also reads well in the repository. The build runs the notebooks.
"""

import html
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util import inspect as sphinx_inspect

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # This tree, not an installed version; for notebooks too.
os.environ["PYTHONPATH"] = str(ROOT)
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

import flax_mha  # noqa: E402
from flax_mha import masks  # noqa: E402

project = "flax_mha"
author = "the flax_mha authors"
release = flax_mha.__version__
extensions = [
    "myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode",
    "sphinx_copybutton",
]  # fmt: skip
# Links to these projects need the network: build with FLAX_MHA_ONLINE=1.
if os.environ.get("FLAX_MHA_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/stable", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
    }
html_theme = "furo"
pygments_dark_style = "github-dark"  # The default underlines modules.
html_title = f"flax_mha {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
exclude_patterns = ["conf.py", "figures.py"]

myst_heading_anchors = 3  # So that links such as sharding.md#long-sequences are checked.
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = False  # Evaluated signatures say more than the source.
autodoc_typehints = "none"  # Docstrings have shapes and dtypes, which types lack.
maximum_signature_line_length = 88
napoleon_attr_annotations = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
copybutton_prompt_text = ">>> "

SHORTER = (
    (r"(\w+)\(\s+# attributes[^)]*\)", r"\1(…)"),
    (r", parent: .*? = <.*?>, name: str \| None = None", ""),
    (r"str \| type\[Any\] \| dtype \| SupportsDType \| Any", "Dtype"),
    (r"None \| str \| Precision( \| \w+(\[[^]]*\])?)*", "PrecisionLike"),
    (r"Array \| ndarray", "Array"),
    (r"<function (\w+)[^,]*>", r"\1"),
    (r"<class '(?:\w+\.)*(\w+)'>", r"\1"),
)
# Search terms, by the page that should come first.
SEARCHED = {
    "coming-from-huggingface": ["Hugging Face", "transformers", "attention_mask", "left padding"],
    "decoding": ["KV cache", "cache", "speculative decoding", "int8 cache"],
    "fine-tune": ["LoRA", "QLoRA", "quantization", "PEFT", "qwix"],
    "kernels": ["flash attention", "FlashAttention", "cuDNN", "splash attention", "kernel"],
    "masks": ["sliding window", "causal mask", "padding mask", "packing", "mask"],
    "models": ["BERT", "GPT-2", "Llama", "ViT", "Whisper"],
    "positions": ["RoPE", "rotary embedding", "YaRN"],
    "quickstart": ["GQA", "grouped-query attention", "MQA", "num_kv_heads"],
    "scores": ["ALiBi", "soft cap", "relative position bias"],
    "sharding": ["pmap", "shard_map", "tensor parallel", "FSDP", "context parallel", "mesh"],
    "training": ["checkpoint", "optax", "training loop"],
}
# Its file names would rank this page above those that explain.
NOT_SEARCHED = ("architecture",)
SPAN = re.compile(r"(`[^`]+`)")
NAME = re.compile(r"`[A-Za-z_][\w.]*`")


def read_included(app: Sphinx, path: Path, page: str, source: list[str]) -> None:
    """Point links of included root files to the pages that include them."""
    names = {"CHANGELOG": "changelog", "CONTRIBUTING": "contributing", "SECURITY": "security"}
    for file, page in names.items():
        source[0] = source[0].replace(f"]({file}.md)", f"](docs/{page}.md)")
    # These have no page.
    source[0] = re.sub(r"\[([^]]+)\]\((CITATION\.cff|LICENSE)\)", r"\1", source[0])


def as_rst(line: str) -> str:
    """Return a line of Markdown as reStructuredText, with names in backticks as links."""
    parts = SPAN.split(line)
    for i, part in enumerate(parts):
        if NAME.fullmatch(part):
            parts[i] = f":py:obj:{part}"
        elif SPAN.fullmatch(part):
            parts[i] = f"`{part}`"
        else:
            parts[i] = re.sub(r"(?<!^)[*|]|_(?=\W|$)|(?<=: \w)\.$", r"\\\g<0>", part)
    return "".join(parts)


def as_table(rows: list[str]) -> list[str]:
    """Return a Markdown table as a list-table."""
    lines = ["", ".. list-table::", "   :header-rows: 1", ""]
    for row in (rows[0], *rows[2:]):
        for i, cell in enumerate(row.strip("| ").split(" | ")):
            lines.append(f"   {'  ' if i else '* '}- {as_rst(cell)}")
    return [*lines, ""]


def read_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list) -> None:
    """Convert docstrings, Markdown in Google's sections, for napoleon."""
    found: list[str] = []
    rows: list[str] = []
    code, above = False, ""
    for line in [*lines, ""]:
        if rows and not line.startswith("|"):
            found += as_table(rows)
            rows = []
        if line.startswith("    ") and not above.strip() and not code:  # Equations.
            found += ["::", ""]
            code = True
        elif line.strip() and not line.startswith("    "):
            code = False
        if line.startswith("|"):
            rows.append(line)
        else:
            example = code or line.lstrip().startswith((">>>", "..."))
            found.append(line if example else as_rst(line))
        above = line
    lines[:] = found


def shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str, Any] | None:
    """Return a signature with types, without the fields that all linen modules have."""
    if signature is None:
        return None
    if what in ("class", "function", "method"):
        # autodoc would show overloads, which hide arguments, and `__new__` of linen layers.
        target = obj.__init__ if inspect.isclass(obj) else obj
        given = sphinx_inspect.signature(target, bound_method=what != "function")
        signature = sphinx_inspect.stringify_signature(
            given, show_return_annotation=what != "class", unqualified_typehints=True
        )
        signature, _, returned = signature.partition(" -> ")
    for pattern, by in SHORTER:
        signature = re.sub(pattern, by, signature)
    return signature, returned


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Keep only methods of this package with their own documentation."""
    if what != "class":
        return None
    method = obj.fget if isinstance(obj, property) else obj
    module = getattr(method, "__module__", None) or ""  # Some of Python's own have none.
    ours = inspect.isroutine(method) and module.startswith("flax_mha")
    return None if ours and not (method.__doc__ or "See `").startswith("See `") else True


def add_index_entries(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the page's terms to the index, which the search shows first."""
    if words := ", ".join(f"! {entry}" for entry in SEARCHED.get(page, [])):
        before, title, after = re.split(r"(?m)^(# .*\n)", source[0], maxsplit=1)
        source[0] = f"{before}{title}\n```{{index}} {words}\n```\n{after}"


def hide_from_search(app: Sphinx, env: Any) -> None:
    """Leave the text of these pages out of the search, but not their titles."""
    for page in NOT_SEARCHED:
        env.metadata[page]["nosearch"] = ""


class MaskFigure(Directive):
    """Pictures of masks, one expression per line, for the page on masks."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the pictures side by side."""
        figures = "".join(draw_mask(line) for line in self.content if line.strip())
        return [nodes.raw("", f'<div class="masks">{figures}</div>', format="html")]


def draw_mask(expression: str, length: int = 12) -> str:
    """Return a picture of a mask as SVG."""
    table = np.asarray(eval(expression, vars(masks) | {"np": np}).dense(length))[0]
    cells = "".join(
        f'<rect x="{j}" y="{i}" class="{"seen" if seen else "hidden"}"/>'
        for (i, j), seen in np.ndenumerate(table)
    )
    box, name = f"-.1 -.1 {length + 0.1} {length + 0.1}", html.escape(expression)
    drawing = f'<svg viewBox="{box}" role="img" aria-label="{name}">{cells}</svg>'
    caption = f"<figcaption><code>{name}</code></figcaption>"
    return f"<figure>{drawing}{caption}</figure>"


def setup(app: Sphinx) -> None:
    """Connect the functions above; Sphinx calls this."""
    app.add_directive("mask", MaskFigure)
    app.connect("include-read", read_included)
    app.connect("source-read", add_index_entries)
    app.connect("env-updated", hide_from_search)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
