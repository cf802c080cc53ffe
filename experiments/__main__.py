"""Programs over flax_mha. Each has a --help.

python -m experiments.train       train a task, or resume a run
python -m experiments.generate    ask a trained run or a published model for text
python -m experiments.look        look at the attention heads of either on a prompt
python -m experiments.convert     convert a Hugging Face folder to Orbax, and back
python -m experiments.measure     measure the layer: times, bytes, launches, errors
python -m experiments.plan        plan a run on absent devices
python -m experiments.studies.NAME    answer a question by experiments, see docs/studies
"""

print(__doc__)
