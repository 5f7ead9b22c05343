"""How a patch gets into this process: found, diagnosed, installed, recorded, taken out again."""
