"""The papers' claims as code, one folder a paper, and what we found: `netkin reproduce --list` shows them."""
