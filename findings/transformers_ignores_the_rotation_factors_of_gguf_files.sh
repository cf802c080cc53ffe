#!/usr/bin/env bash
# transformers loads Llama 3.1 and 3.2 from a GGUF file without their scaled rotation.
#
# One expects `from_pretrained(..., gguf_file=...)` to compute what llama.cpp computes. llama.cpp's converter writes
# Llama 3's rotation not as a setting but as a tensor, `rope_freqs.weight`: the factors by which the frequencies are
# divided. transformers 5.24.0 has no parameter of that name and leaves the tensor out without a word, so that the
# logits are the same for any factors. Short prompts hide it, as only the slow frequencies have factors above 1.
# Seen when a loader of such files was compared with transformers.
# Instead: give the model's own `rope_scaling` to the config after loading, or load the safetensors folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for python3 in python3.11 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python3 python3.12 python3.13; do
  ! "$python3" -c "import ensurepip" 2>/dev/null || break
done
"$python3" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.14.1" "transformers==5.24.0" "accelerate==1.15.0" "gguf==0.19.0"
cat > "$folder/rope.py" <<'PY'
import pathlib
import sys

import gguf
import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(sys.argv[1])
WIDTH, HIDDEN, VOCABULARY, HEADS = 32, 64, 40, 4


def logits(name, factors):
    """Return the logits of a one-layer Llama of random weights, with the factors of its frequencies in the file."""
    writer, rng = gguf.GGUFWriter(FOLDER / name, "llama"), np.random.default_rng(0)
    writer.add_context_length(131072)
    writer.add_block_count(1)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_token_list([f"w{i}" for i in range(VOCABULARY)])
    shapes = {f"blk.0.attn_{x}": (WIDTH, WIDTH) for x in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{x}": (HIDDEN, WIDTH) for x in ("gate", "up")}
    shapes |= {x: (WIDTH,) for x in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    shapes |= {x: (VOCABULARY, WIDTH) for x in ("token_embd", "output")} | {"blk.0.ffn_down": (WIDTH, HIDDEN)}
    for tensor, shape in shapes.items():
        writer.add_tensor(f"{tensor}.weight", rng.normal(size=shape).astype(np.float32))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=name).eval()
    with torch.no_grad():
        return model(torch.arange(VOCABULARY)[None]).logits


same = torch.equal(logits("plain.gguf", [1, 1, 1, 1]), logits("scaled.gguf", [1, 1.7, 8, 8]))
print(f"transformers {transformers.__version__}: equal logits with factors 1 1 1 1 and 1 1.7 8 8: {same}")
sys.exit(not same)
PY
"$folder/venv/bin/python" "$folder/rope.py" "$folder"
