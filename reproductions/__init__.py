"""The papers' claims as code, one folder a paper, and what we found: `python -m reproductions` shows them."""
