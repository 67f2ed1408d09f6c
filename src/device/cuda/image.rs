use crate::device::Arithmetic;
use crate::dtype::DType;
use crate::error::Result;
use std::borrow::Cow;
use std::ffi::CStr;
pub(crate) fn image(_: u32, _: u32) -> Result<Cow<'static, [u8]>> {
    Ok(Cow::Borrowed(b"x"))
}
pub(crate) const COPY: &CStr = c"flexring_copy";
pub(crate) fn symbol(_: DType, _: Arithmetic) -> &'static CStr {
    COPY
}
pub(crate) fn origin() -> String {
    String::new()
}
