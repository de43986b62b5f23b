"""What tests share. `lab` is for those in lab/tests."""
