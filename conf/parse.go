package conf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/BurntSushi/toml"
)

// parse overrides c by what text says. All unknown keys and wrong types are
// reported at once, each as "file:line: fault".
func (c *Config) parse(file, text string) error {
	var tree map[string]toml.Primitive
	md, err := toml.Decode(text, &tree)
	if err != nil {
		return inFile(file, err)
	}
	if faults := configShape.check(&document{text: text, md: &md}, tree); len(faults) > 0 {
		slices.SortStableFunc(faults, func(a, b fault) int { return a.line - b.line })
		errs := make([]error, len(faults))
		for i, f := range faults {
			errs[i] = fmt.Errorf("%s:%d: %s", file, f.line, f.text)
		}
		return errors.Join(errs...)
	}
	return inFile(file, c.override(text))
}

// override decodes text over c. Of a handler and of the media types it replaces
// only the keys that are there; the list of routes is replaced as a whole. The decoder alone would
// begin a handler anew, and fill old routes up.
func (c *Config) override(text string) error {
	next := *c
	next.Handlers, next.Routes = nil, nil
	next.MediaTypes = maps.Clone(c.MediaTypes)
	md, err := toml.Decode(text, &next)
	if err != nil {
		return err
	}
	if !md.IsDefined("routes") {
		next.Routes = c.Routes
	}
	var given struct {
		Handlers map[string]toml.Primitive `toml:"handlers"`
	}
	if md, err = toml.Decode(text, &given); err != nil {
		return err
	}
	next.Handlers = maps.Clone(c.Handlers)
	for name, table := range given.Handlers {
		h, known := next.Handlers[name]
		if !known {
			h = newHandler(name)
		}
		h.Options, h.PinnedImages = slices.Clone(h.Options), slices.Clone(h.PinnedImages) // decoding reuses the arrays
		if err := md.PrimitiveDecode(table, &h); err != nil {
			return err
		}
		if next.Handlers == nil {
			next.Handlers = map[string]Handler{}
		}
		next.Handlers[name] = h
	}
	*c = next
	return nil
}

// inFile adds the file, and the line where the error tells it apart, to an
// error of the TOML library.
func inFile(file string, err error) error {
	if err == nil {
		return nil
	}
	if at, ok := errors.AsType[toml.ParseError](err); ok {
		// The library counts a line too few where the text ends in an escape.
		return fmt.Errorf("%s:%d: %s", file, max(1, at.Position.Line), oneLine(at.Message))
	}
	return fmt.Errorf("%s: %w", file, err)
}

// oneLine escapes what does not print. The library quotes keys and numbers as
// they are, line ends included.
func oneLine(message string) string {
	var b strings.Builder
	for _, r := range message {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}
