//! The digest of samples by which a cache of a teacher's distributions knows its data.

use sha2::{Digest, Sha256};

use super::{DataError, Samples};

impl Samples {
    /// A SHA-256 of the lengths, tokens and labels of all samples in file order, in hexadecimal. Unlike [`Self::hash`] it does
    /// not depend on packing.
    ///
    /// Of a part of the samples it is the digest of that part.
    pub fn content_digest(&self) -> Result<String, DataError> {
        let mut digest = Sha256::new();
        let mut numbers = Vec::new();
        for sample in 0..self.totals().samples {
            numbers.clear();
            self.append_ids(sample, &mut numbers)?;
            self.append_labels(sample, 0, &mut numbers)?;
            digest.update(self.sample_length(sample).to_le_bytes());
            digest.update(bytemuck::cast_slice::<i32, u8>(&numbers));
        }
        let digest: [u8; 32] = digest.finalize().into();
        let (words, _) = digest.as_chunks::<16>();
        Ok(format!("{:032x}{:032x}", u128::from_be_bytes(words[0]), u128::from_be_bytes(words[1])))
    }

    /// Tokens of the token cache before those of a sample; samples that were held out count.
    pub fn token_offset(&self, sample: u64) -> u64 {
        self.offset(sample) / 2
    }
}

#[cfg(test)]
mod tests {
    use super::super::SamplesBuilder;

    #[test]
    fn digests_know_lengths_tokens_and_labels() {
        let digest = |rows: &[(&[i32], &[i32])]| {
            let mut samples = SamplesBuilder::new(9);
            for (ids, labels) in rows {
                samples.push(ids, labels);
            }
            samples.finish().unwrap().content_digest().unwrap()
        };
        let usual = digest(&[(&[1, 2], &[1, 2]), (&[3], &[3])]);
        assert_eq!(usual, digest(&[(&[1, 2], &[1, 2]), (&[3], &[3])]));
        assert_ne!(usual, digest(&[(&[1], &[1]), (&[2, 3], &[2, 3])]));
        assert_ne!(usual, digest(&[(&[1, 2], &[-100, 2]), (&[3], &[3])]));
        assert_ne!(usual, digest(&[(&[1, 4], &[1, 4]), (&[3], &[3])]));
    }
}
