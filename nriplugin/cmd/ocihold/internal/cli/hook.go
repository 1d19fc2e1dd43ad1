package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/ocihold/ocihold/conf"
)

// checkHook makes sure that CRI-O will run the guard. CRI-O passes over a hook
// whose program is not there without a word, and then a container whose volumes
// were not injected would start.
func checkHook(config conf.Config, crio *conf.CRIO) error {
	if err := unix.Access(config.Hook.Guard, unix.X_OK); err != nil {
		return fmt.Errorf("the OCI hook %s cannot be run: install ocihold-guard there or set [hook] guard: %w", config.Hook.Guard, err)
	}
	want, err := conf.HookFile(config)
	if err != nil {
		return err
	}
	for _, dir := range crio.HooksDir {
		files, err := filepath.Glob(filepath.Join(dir, "*.json"))
		if err != nil {
			return fmt.Errorf("list hook files: %w", err)
		}
		for _, file := range files {
			have, err := os.ReadFile(file)
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("read hook file: %w", err)
			}
			if bytes.Equal(have, want) {
				return nil
			}
		}
	}
	return fmt.Errorf("none of CRI-O's hooks_dir %q has the current hook file, without which containers could start without "+
		"their volumes: run 'ocihold config hook --write'", crio.HooksDir)
}

// hookFile is where the hook file belongs.
func hookFile(config conf.Config, crio *conf.CRIO) string {
	return filepath.Join(conf.HookDir(config, crio), "ocihold.json")
}
