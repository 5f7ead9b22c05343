"""Flags of pretrain_gpt.py: a tiny GPT, five steps on drawn data, and the two overlaps."""

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32
    --max-position-embeddings 32 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --transformer-impl local --no-persist-layer-norm
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion
    --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --seed 3
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2
    --clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 2 --ckpt-format torch_dist
    --train-iters 5 --save-interval 2 --eval-interval 3 --save ck
"""
# Without the last, the padding of buckets is saved, which nobody has set.
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
BOTH = f"--bf16 {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
