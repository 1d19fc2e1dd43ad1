package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/crio"
	"github.com/ocihold/ocihold/storage"
)

// bareCRIO is CRI-O's configuration without Ocihold's drop-in, for rendering it.
// Whether CRI-O has a validator is for the running one to say, or for a file that
// names it: the drop-in stays the same when CRI-O is down.
func bareCRIO(ctx context.Context, config conf.Config, inForce *conf.CRIO) (*conf.CRIO, error) {
	bare, err := conf.ReadCRIOWithoutDropIn(config.CRIO.Config, config.CRIO.ConfigDir)
	if err != nil || bare.NRI.DefaultValidator != nil {
		return bare, err
	}
	known := inForce.NRI.DefaultValidator != nil
	if !known {
		ctx, cancel := context.WithTimeout(ctx, askLimit)
		defer cancel()
		live, err := crio.NewClient(inForce.Listen).Config(ctx)
		known = err == nil && live.NRI.DefaultValidator != nil
	}
	if known {
		bare.NRI.DefaultValidator = &conf.CRIOValidator{}
	}
	return bare, nil
}

// installDropIn writes the drop-in for CRI-O and makes the roots that it names.
// inForce is CRI-O's configuration, bare is that without Ocihold's drop-in.
func (a *app) installDropIn(ctx context.Context, config conf.Config, inForce, bare *conf.CRIO) error {
	file := config.DropInFile()
	if err := checkDropInFile(file, inForce); err != nil {
		return fmt.Errorf("install the drop-in for CRI-O: %w", err)
	}
	installed := installedRoots(inForce, bare)
	if err := a.checkTakenOut(ctx, config, inForce, installed); err != nil {
		return fmt.Errorf("install the drop-in for CRI-O: %w", err)
	}
	if err := prepareRoots(config, inForce, installed); err != nil {
		return fmt.Errorf("install the drop-in for CRI-O: %w", err)
	}
	text, err := conf.DropIn(config, bare)
	if err != nil {
		return err
	}
	// CRI-O reads every file of its directory, whatever it is called.
	changed, err := install(file, text, filepath.Dir(config.CRIO.ConfigDir))
	if err != nil {
		return fmt.Errorf("install the drop-in for CRI-O: %w", err)
	}
	if changed {
		fmt.Fprintf(a.out, "Wrote %s.\n", file)
	} else {
		fmt.Fprintf(a.out, "%s is up to date.\n", file)
	}

	now, err := conf.ReadCRIO(config.CRIO.Config, config.CRIO.ConfigDir)
	if err != nil {
		return fmt.Errorf("read CRI-O's configuration with the drop-in: %w", err)
	}
	if unmet := conf.Unmet(config, now); len(unmet) > 0 {
		return fmt.Errorf("files in %s that are read after %s override it: give it a name that comes last, by [crio] drop_in: %s",
			config.CRIO.ConfigDir, file, strings.Join(unmet, "; "))
	}
	a.tellRestarts(ctx, config, now)
	return nil
}

// checkDropInFile makes sure that the drop-in replaces nothing but an earlier
// one, and is the only one.
func checkDropInFile(file string, inForce *conf.CRIO) error {
	for _, other := range inForce.DropIns {
		if filepath.Clean(other) != filepath.Clean(file) {
			return fmt.Errorf("%s is a drop-in of ocihold's too: remove it, or set drop_in = %q in [crio]", other, other)
		}
	}
	info, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if len(inForce.DropIns) == 0 && info.Size() > 0 {
		return fmt.Errorf("%s is not by ocihold: rename it, or set another drop_in in [crio]", file)
	}
	return nil
}

// installedRoots are the roots that only Ocihold's drop-in has CRI-O read.
func installedRoots(inForce, bare *conf.CRIO) []string {
	others := conf.ImageStores(bare.StorageOptions)
	return slices.DeleteFunc(conf.ImageStores(inForce.StorageOptions), func(root string) bool { return slices.Contains(others, root) })
}

// checkTakenOut refuses to take a root from CRI-O that it needs.
func (a *app) checkTakenOut(ctx context.Context, config conf.Config, inForce *conf.CRIO, installed []string) error {
	var out []string
	for _, root := range installed {
		isRoot := func(h conf.Handler) bool { return filepath.Clean(h.Root) == root }
		if !slices.ContainsFunc(config.Roots(), isRoot) {
			out = append(out, root)
		}
	}
	if len(out) == 0 {
		return nil
	}
	roots, err := openRoots(config, inForce, a.logger(config))
	if err != nil {
		return err
	}
	var faults []error
	for _, root := range out {
		users, err := roots.Users(ctx, root)
		if err == nil && len(users) > 0 {
			err = fmt.Errorf("the root %s cannot be taken out while something needs it: remove these first, or put its handler back "+
				"into ocihold's configuration:\n  %s", root, strings.Join(users, "\n  "))
		}
		faults = append(faults, err)
	}
	return errors.Join(errors.Join(faults...), roots.Close())
}

// prepareRoots makes the directories that CRI-O will not start without. A root
// that was made before is not made again: when it is not there, its disk is not.
func prepareRoots(config conf.Config, inForce *conf.CRIO, installed []string) error {
	if err := sameDirectories(config, inForce); err != nil {
		return err
	}
	for _, h := range config.Roots() {
		options := storage.Options{Name: h.Name, GraphRoot: h.Root, RunRoot: h.RunRoot}
		var err error
		if slices.Contains(installed, filepath.Clean(h.Root)) {
			if err = storage.CheckRoot(options); errors.Is(err, storage.ErrUnmounted) {
				err = fmt.Errorf("%w (if its disk is lost and another is there: echo %s > %s)", err, h.Name, filepath.Join(h.Root, ".ocihold-root"))
			}
		} else {
			err = storage.PrepareRoot(options)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sameDirectories finds roots that are one directory by links or bind mounts.
func sameDirectories(config conf.Config, inForce *conf.CRIO) error {
	type root struct {
		what, path string
		info       fs.FileInfo
	}
	roots := []root{{what: "CRI-O's root", path: inForce.Root}}
	if inForce.ImageStore != "" {
		roots = append(roots, root{what: "CRI-O's imagestore", path: inForce.ImageStore})
	}
	for _, h := range config.Roots() {
		roots = append(roots, root{what: "the root of handler " + h.Name, path: h.Root})
	}
	for i := range roots {
		info, err := os.Stat(roots[i].path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		roots[i].info = info
		for _, other := range roots[:i] {
			if other.info != nil && os.SameFile(info, other.info) {
				return fmt.Errorf("%s, %s, and %s, %s, are one directory: give each a directory of its own",
					other.what, other.path, roots[i].what, roots[i].path)
			}
		}
	}
	return nil
}

// tellRestarts says what must be restarted so that the drop-in is in force. now
// is what CRI-O's files say.
func (a *app) tellRestarts(ctx context.Context, config conf.Config, now *conf.CRIO) {
	live, err := crio.NewClient(now.Listen).Config(ctx)
	switch {
	case err != nil:
		fmt.Fprintln(a.out, "CRI-O does not answer. Start it, then ocihold: systemctl start crio ocihold")
	case len(conf.Unmet(config, live)) > 0 || !slices.Equal(stores(live), stores(now)):
		fmt.Fprintln(a.out, "Restart CRI-O, which does not reload these settings, then ocihold: systemctl restart crio ocihold")
	default:
		fmt.Fprintln(a.out, "CRI-O runs with it. Restart ocihold if its own configuration changed: systemctl restart ocihold")
	}
}

// stores are the additional image stores of a configuration, in no order.
func stores(crio *conf.CRIO) []string {
	return slices.Sorted(slices.Values(conf.ImageStores(crio.StorageOptions)))
}
