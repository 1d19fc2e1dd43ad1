package conf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Load reads file and its drop-ins, the *.toml files of file + ".d", over
// [Default], and validates the result. A file that does not exist is an error
// (fs.ErrNotExist) only where explicit says that somebody named it; the
// drop-in directory may always be absent.
func Load(file string, explicit bool) (Config, error) {
	c := Default()
	if err := c.readFile(file); err != nil && (explicit || !errors.Is(err, fs.ErrNotExist)) {
		return Config{}, err
	}
	// ReadDir and not Glob: the path is a name, not a pattern.
	dir := file + ".d"
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Config{}, fmt.Errorf("read drop-in directory: %w", err)
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".toml") {
			continue
		}
		if err := c.readFile(filepath.Join(dir, e.Name())); err != nil {
			return Config{}, err
		}
	}
	c.nameHandlers()
	if err := c.Validate(); err != nil {
		return Config{}, fmt.Errorf("validate configuration of %s: %w", file, err)
	}
	return c, nil
}

func (c *Config) readFile(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	return c.parse(file, string(text))
}
