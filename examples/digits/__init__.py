"""Data and training of the demo: scikit-learn's handwritten digits (1,797 images of 8 x 8 pixels) as graphs."""
