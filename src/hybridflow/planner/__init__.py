"""What a run will take: memory and time of each phase, and the placement that takes least. No torch."""
