"""The only room that imports torch: capture, profile, measure and deploy on stock PyTorch."""
