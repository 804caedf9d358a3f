"""Offline stages: profile, collect, select, value, label, distill, export, evaluate."""
