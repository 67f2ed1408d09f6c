//! The gradients of well-known models, and the buckets in which DistributedDataParallel reduces them.
//!
//! Owns the lengths of the gradients and their division into buckets.
//!
//! Sources: the class `ResNet` of torchvision (`torchvision/models/resnet.py`, `resnet50`: 25,557,032
//! parameters); OpenAI's GPT-2 with 124M parameters as in `modeling_gpt2.py` of Hugging Face's transformers
//! (`gpt2`: 12 blocks, width 768, 50,257 tokens, 1,024 positions, the output layer shares the embedding:
//! 124,439,808 parameters); `compute_bucket_assignment_by_size` in `torch/csrc/distributed/c10d/reducer.cpp`
//! of PyTorch, and its default sizes.

/// Bytes from which on the first bucket is complete: it is small, so that communication begins early.
const FIRST_BUCKET: usize = 1 << 20;

/// Bytes from which on each further bucket is complete (`bucket_cap_mb`).
const FURTHER_BUCKETS: usize = 25 << 20;

/// The gradients of a training step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gradients {
    /// The name of the model, or the lengths as the user gave them.
    pub name: String,
    /// The number of elements of each gradient, in the order of the model's parameters.
    pub lengths: Vec<usize>,
}

/// Gradients that are reduced together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradientBucket {
    /// The number of gradients.
    pub gradients: usize,
    /// The number of their elements.
    pub elements: usize,
}

impl Gradients {
    /// The gradients of the model with this name, or of these lengths, separated by commas.
    ///
    /// # Errors
    /// A message that says what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let lengths = match text {
            "resnet50" => resnet50(),
            "gpt2" => gpt2(),
            _ => {
                let length = |length: &str| length.parse().ok().filter(|length| *length > 0);
                let lengths = text.split(',').map(length).collect::<Option<Vec<usize>>>();
                let sum = |lengths: &Vec<usize>| {
                    lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length))
                };
                // An element has 8 bytes at most.
                let fits = |elements| elements <= isize::MAX as usize / 8;
                lengths.filter(|lengths| sum(lengths).is_some_and(fits)).ok_or_else(|| {
                    "expected resnet50, gpt2, or the number of elements of each gradient, such as 1000,250,7".to_owned()
                })?
            }
        };
        Ok(Self { name: text.to_owned(), lengths })
    }

    /// The number of elements of all gradients.
    pub fn elements(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// The buckets for elements of `size` bytes, in the order in which they are reduced: gradients are ready
    /// in the reverse order of the parameters. A bucket is complete with the gradient that makes it as long
    /// as its limit or longer.
    pub fn buckets(&self, size: usize) -> Vec<GradientBucket> {
        let (mut buckets, mut bucket) = (Vec::new(), GradientBucket::default());
        for length in self.lengths.iter().rev() {
            bucket.gradients += 1;
            bucket.elements += length;
            let limit = if buckets.is_empty() { FIRST_BUCKET } else { FURTHER_BUCKETS };
            if bucket.elements * size >= limit {
                buckets.push(std::mem::take(&mut bucket));
            }
        }
        if bucket.gradients > 0 {
            buckets.push(bucket);
        }
        buckets
    }
}

fn resnet50() -> Vec<usize> {
    // Weight and bias of a batch normalization.
    let norm = |channels: usize| [channels; 2];
    let mut lengths = vec![64 * 3 * 7 * 7];
    lengths.extend(norm(64));
    let mut input = 64;
    for (blocks, width) in [(3, 64), (4, 128), (6, 256), (3, 512)] {
        let output = 4 * width;
        for block in 0..blocks {
            lengths.push(width * input);
            lengths.extend(norm(width));
            lengths.push(width * width * 3 * 3);
            lengths.extend(norm(width));
            lengths.push(output * width);
            lengths.extend(norm(output));
            if block == 0 {
                // The shortcut must change the number of channels, too.
                lengths.push(output * input);
                lengths.extend(norm(output));
            }
            input = output;
        }
    }
    lengths.extend([1000 * input, 1000]);
    lengths
}

fn gpt2() -> Vec<usize> {
    const WIDTH: usize = 768;
    let linear = |input: usize, output: usize| [input * output, output];
    // Weight and bias of a layer normalization.
    let norm = [WIDTH; 2];
    let mut lengths = vec![50_257 * WIDTH, 1024 * WIDTH];
    for _ in 0..12 {
        lengths.extend(norm);
        lengths.extend(linear(WIDTH, 3 * WIDTH));
        lengths.extend(linear(WIDTH, WIDTH));
        lengths.extend(norm);
        lengths.extend(linear(WIDTH, 4 * WIDTH));
        lengths.extend(linear(4 * WIDTH, WIDTH));
    }
    lengths.extend(norm);
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gradients(text: &str) -> Gradients {
        Gradients::parse(text).expect(text)
    }

    #[test]
    fn models_have_the_published_number_of_parameters() {
        let resnet50 = gradients("resnet50");
        assert_eq!((resnet50.elements(), resnet50.lengths.len()), (25_557_032, 161));
        let gpt2 = gradients("gpt2");
        assert_eq!((gpt2.elements(), gpt2.lengths.len()), (124_439_808, 148));
    }

    #[test]
    fn buckets_are_those_of_distributed_data_parallel() {
        let bytes = |name: &str| -> Vec<(usize, usize)> {
            let buckets = gradients(name).buckets(4);
            buckets.iter().map(|bucket| (bucket.gradients, 4 * bucket.elements)).collect()
        };
        assert_eq!(
            bytes("resnet50"),
            [(2, 8_196_000), (15, 31_502_336), (12, 26_255_360), (51, 26_550_272), (81, 9_724_160)]
        );
        let gpt2 = bytes("gpt2");
        // Each block is a bucket but for the offset by the first one; the embedding, which is ready last, is
        // in the last one.
        assert_eq!((gpt2.len(), gpt2[0]), (13, (4, 9_446_400)));
        assert!(gpt2[1..12].iter().all(|bucket| *bucket == (12, 28_351_488)), "{gpt2:?}");
        assert_eq!(gpt2[12], (12, 176_446_464));
        // The first bucket ends at 1 MiB, the others at 25 MiB; what is left makes the last one.
        assert_eq!(
            bytes("5,6553600,7,6553599,262144"),
            [(1, 1 << 20), (2, (25 << 20) + 24), (1, 25 << 20), (1, 20)]
        );
        assert_eq!(bytes("3,2"), [(2, 20)]);
        assert_eq!(gradients("262144,262144").buckets(2).len(), 1);
    }

    #[test]
    fn what_is_no_model_is_refused() {
        for text in ["", "resnet", "1,,2", "0", "1,-2", "99999999999999999999", "18446744073709551615,1"] {
            let message = Gradients::parse(text).expect_err(text);
            assert!(message.starts_with("expected resnet50, gpt2, or the number of elements"), "{message}");
        }
    }
}
