"""GPUs that are real to llama.cpp on a machine without one; decides what fails, never who may use them."""
