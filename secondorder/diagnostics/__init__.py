"""What an optimizer tells about itself."""
