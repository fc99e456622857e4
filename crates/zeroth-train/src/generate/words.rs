//! From text to tokens and back, by a folder's tokenizer.json: what `generate` needs of it.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

/// A tokenizer that cannot do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum WordsError {
    /// There is none.
    #[error("{} has no tokenizer.json: give tokens with --prompt-ids", folder.display())]
    Missing {
        /// The folder.
        folder: PathBuf,
    },
    /// It could not be read.
    #[error("cannot read {}: {reason}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It refused the text or the tokens.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
}

/// A folder's tokenizer.
pub struct Words {
    tokenizer: Tokenizer,
}

impl Words {
    /// Reads the folder's tokenizer.json.
    pub fn open(folder: &Path) -> Result<Self, WordsError> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(WordsError::Missing { folder: folder.to_owned() });
        }
        match Tokenizer::from_file(&path) {
            Ok(tokenizer) => Ok(Self { tokenizer }),
            Err(error) => Err(WordsError::Broken { path, reason: error.to_string() }),
        }
    }

    /// A text's tokens, with what the tokenizer itself puts around it.
    pub fn prompt(&self, text: &str) -> Result<Vec<i32>, WordsError> {
        let encoded =
            self.tokenizer.encode(text, true).map_err(|error| WordsError::Failed(error.to_string()))?;
        Ok(encoded.get_ids().iter().map(|id| *id as i32).collect())
    }

    /// The text of tokens, special ones left out.
    pub fn decode(&self, ids: &[i32]) -> Result<String, WordsError> {
        let ids: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
        self.tokenizer.decode(&ids, true).map_err(|error| WordsError::Failed(error.to_string()))
    }
}
