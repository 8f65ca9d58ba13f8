"""IFEval (arXiv 2311.07911): instructions whose keeping a program can verify; `checker.py` has the reward."""
