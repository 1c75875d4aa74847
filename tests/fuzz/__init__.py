"""Coverage-guided fuzzing of the codecs (atheris): ``python -m tests.fuzz TARGET --secs 60``."""
