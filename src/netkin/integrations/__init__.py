"""Thin adapters to other people's training loops and logs; each imports its package when it is used, not before."""
