"""The parts that the ops of attention share: schedules, tiles of pages, softmax, tolerance."""
