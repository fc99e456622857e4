//! The text of generated tokens as it grows: printed, and searched for texts that end it.

use std::ops::ControlFlow;

use zeroth::data::Encoder;

use crate::output;

/// Generated text. Characters that span several tokens are printed once complete, and a text that may begin one of
/// `--stop` once it cannot.
pub(super) struct TextStream<'a> {
    encoder: &'a Encoder,
    /// Token ids that end the text; they are not part of it.
    stop_ids: &'a [i32],
    /// Texts that end it (`--stop`).
    stop_texts: &'a [String],
    prints: bool,
    ids: Vec<i32>,
    /// Bytes printed so far.
    shown: usize,
    /// Where a stop text begins.
    cut: Option<usize>,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(
        encoder: &'a Encoder,
        stop_ids: &'a [i32],
        stop_texts: &'a [String],
        prints: bool,
    ) -> Self {
        Self { encoder, stop_ids, stop_texts, prints, ids: Vec::new(), shown: 0, cut: None }
    }

    /// Takes the next token; breaks at a stop text.
    pub(super) fn take(&mut self, id: i32) -> ControlFlow<()> {
        if self.stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        self.ids.push(id);
        if !self.prints && self.stop_texts.is_empty() {
            return ControlFlow::Continue(());
        }
        let text = self.encoder.decode(&self.ids);
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        self.cut = first_stop(&text, self.stop_texts);
        if let Some(cut) = self.cut {
            self.show(&text, cut);
            return ControlFlow::Break(());
        }
        self.show(&text, whole - held_back(&text[..whole], self.stop_texts));
        ControlFlow::Continue(())
    }

    fn show(&mut self, text: &str, until: usize) {
        if let Some(new) = text.get(self.shown..until).filter(|_| self.prints) {
            output::stream(new);
            self.shown = until;
        }
    }

    /// Whether a stop text ended the text.
    pub(super) fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// The whole text, without the stop text and what follows it.
    pub(super) fn text(&self) -> String {
        let mut text = self.encoder.decode(&self.ids);
        text.truncate(self.cut.unwrap_or(text.len()));
        text
    }

    /// Prints held-back text and a newline.
    pub(super) fn end(&mut self) {
        let text = self.text();
        self.show(&text, text.len());
        if self.prints {
            output::stream("\n");
        }
    }
}

/// Where the first of the stop texts begins.
fn first_stop(text: &str, stops: &[String]) -> Option<usize> {
    stops.iter().filter_map(|stop| text.find(stop.as_str())).min()
}

/// Bytes at the end of the text that may begin a stop text.
fn held_back(text: &str, stops: &[String]) -> usize {
    let of_stop = |stop: &String| {
        let lengths = stop.char_indices().map(|(length, _)| length).rev();
        lengths.into_iter().find(|length| text.ends_with(&stop[..*length])).unwrap_or(0)
    };
    stops.iter().map(of_stop).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_held_back_while_it_may_begin_a_stop_text() {
        let stops = ["###".to_owned(), "\nEnd".to_owned(), "é!".to_owned()];
        for (text, held) in [("a", 0), ("a#", 1), ("a##", 2), ("a# b", 0), ("a\nE", 2), ("aé", 2), ("", 0)] {
            assert_eq!(held_back(text, &stops), held, "{text:?}");
        }
        assert_eq!(first_stop("one\nEnd ###", &stops), Some(3));
        assert_eq!(first_stop("one ##", &stops), None);
        assert_eq!((held_back("a#", &[]), first_stop("a#", &[])), (0, None));
    }
}
