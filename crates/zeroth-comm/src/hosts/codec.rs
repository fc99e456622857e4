//! Numbers and texts in messages: little-endian, every length bounded by the reader.

/// Writes a message.
#[derive(Default)]
pub(super) struct MessageBytes(pub(super) Vec<u8>);

impl MessageBytes {
    pub(super) fn byte(&mut self, byte: u8) -> &mut Self {
        self.0.push(byte);
        self
    }

    pub(super) fn flag(&mut self, flag: bool) -> &mut Self {
        self.byte(u8::from(flag))
    }

    pub(super) fn number(&mut self, number: u32) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    pub(super) fn long(&mut self, number: u64) -> &mut Self {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// A text of at most `most` bytes; a longer one is cut.
    pub(super) fn text(&mut self, text: &str, most: usize) -> &mut Self {
        let text = &text[..text.floor_char_boundary(most)];
        self.number(text.len() as u32);
        self.rest(text.as_bytes())
    }

    /// Bytes with their length.
    pub(super) fn part(&mut self, bytes: &[u8]) -> &mut Self {
        self.number(bytes.len() as u32);
        self.rest(bytes)
    }

    pub(super) fn rest(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// Reads a message; `None` where it is not one.
pub(super) struct MessageParts<'a>(pub(super) &'a [u8]);

impl<'a> MessageParts<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    pub(super) fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    pub(super) fn flag(&mut self) -> Option<bool> {
        self.byte().filter(|byte| *byte <= 1).map(|byte| byte == 1)
    }

    pub(super) fn number(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes)
    }

    pub(super) fn long(&mut self) -> Option<u64> {
        self.take(8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes)
    }

    /// A printable text of at most `most` bytes.
    pub(super) fn text(&mut self, most: usize) -> Option<String> {
        let length = self.number().map(|length| length as usize).filter(|length| *length <= most)?;
        let text = std::str::from_utf8(self.take(length)?).ok()?;
        let is_printable = |letter: char| !letter.is_control() || letter == '\n';
        text.chars().all(is_printable).then(|| text.to_owned())
    }

    /// Bytes with their length.
    pub(super) fn part(&mut self) -> Option<&'a [u8]> {
        let length = self.number()? as usize;
        self.take(length)
    }

    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    /// Nothing may be left.
    pub(super) fn end(&self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
