package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ocihold/ocihold/conf"
	"github.com/ocihold/ocihold/imagevolume/scratch"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/control"
	"github.com/ocihold/ocihold/nriplugin/cmd/ocihold/internal/crio"
	"github.com/ocihold/ocihold/storage"
)

// askLimit bounds the wait for each program that is asked.
const askLimit = 10 * time.Second

// The results of a check.
const (
	checkOK      = "ok"
	checkWarning = "warning"
	checkFailed  = "failed"
)

// finding is what one check came to.
type finding struct {
	Check  string `json:"check"`
	Result string `json:"result"`
	Detail string `json:"detail,omitempty"`
	Fix    string `json:"fix,omitempty"`
}

// checker looks at a node.
type checker struct {
	app           *app
	config        conf.Config
	inForce, bare *conf.CRIO // what CRI-O's files say, with and without the drop-in
	live          *conf.CRIO // what CRI-O runs with, nil where it does not answer
	kubelet       string     // its configuration file
	findings      []finding
}

func (a *app) checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Tell whether the node is set up, and how to fix what is not",
		Long: "Look at CRI-O's files, the running CRI-O, the handlers' roots, the hook, the daemon and kubelet, and say of each\n" +
			"whether it is as Ocihold needs it and what to do if not. The exit status is 0 only if nothing failed.",
		Args: cobra.NoArgs,
	}
	output := outputFlag(cmd)
	kubelet := cmd.Flags().String("kubelet-config", defaultKubeletConfig, "kubelet's configuration `file`, where no running kubelet says another")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		config, inForce, err := a.loadCRIO(cmd)
		if err != nil {
			return err
		}
		bare, err := bareCRIO(cmd.Context(), config, inForce)
		if err != nil {
			return fmt.Errorf("read CRI-O's configuration: %w", err)
		}
		c := &checker{app: a, config: config, inForce: inForce, bare: bare, kubelet: *kubelet}
		c.run(cmd.Context())
		if *output == "json" {
			err = writeJSON(a.out, c.findings)
		} else {
			err = writeTable(a.out, findingRows(c.findings))
		}
		failed := 0
		for _, f := range c.findings {
			if f.Result == checkFailed {
				failed++
			}
		}
		if err == nil && failed > 0 {
			err = fmt.Errorf("the node is not set up: %d failed", failed)
		}
		return err
	}
	return cmd
}

func findingRows(findings []finding) [][]string {
	rows := [][]string{{"CHECK", "RESULT", "DETAIL"}}
	for _, f := range findings {
		rows = append(rows, []string{f.Check, f.Result, f.Detail})
		if f.Fix != "" {
			rows = append(rows, []string{"", "", "fix: " + f.Fix})
		}
	}
	return rows
}

func (c *checker) run(ctx context.Context) {
	c.checkHandlers()
	c.checkDropIn()
	c.checkMisplaced()
	c.checkLive(ctx)
	c.checkRoots(ctx)
	c.check("hook", checkHook(c.config, c.inForce), "")
	c.checkWritable()
	c.checkDaemon(ctx)
	c.checkImageService(ctx)
	c.checkKubelet()
	c.checkImages(ctx)
}

func (c *checker) add(check, result, detail, fix string) {
	c.findings = append(c.findings, finding{check, result, oneLine(detail), fix})
}

// check adds an error as a failure, and none as well.
func (c *checker) check(check string, err error, fix string) {
	if err != nil {
		c.add(check, checkFailed, err.Error(), fix)
	} else {
		c.add(check, checkOK, "", "")
	}
}

func oneLine(text string) string { return strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ") }

func (c *checker) checkHandlers() {
	err := c.config.ValidateHandlers(c.inForce)
	if err == nil {
		err = sameDirectories(c.config, c.inForce)
	}
	c.check("handlers", err, "")
}

const writeDropIn = "ocihold config crio --write && systemctl restart crio ocihold"

// checkDropIn looks at CRI-O's files.
func (c *checker) checkDropIn() {
	const check = "drop-in"
	unmet := conf.Unmet(c.config, c.inForce)
	want, err := conf.DropIn(c.config, c.bare)
	switch {
	case err != nil:
		c.check(check, err, "")
	case len(c.inForce.DropIns) > 1:
		c.add(check, checkFailed, "there are several by ocihold: "+strings.Join(c.inForce.DropIns, ", "), "remove all but the one that [crio] drop_in names")
	case len(c.inForce.DropIns) == 0 && len(unmet) > 0:
		c.add(check, checkFailed, "it is not in "+c.config.CRIO.ConfigDir+": "+strings.Join(unmet, "; "), writeDropIn)
	case len(c.inForce.DropIns) == 0:
		c.add(check, checkOK, "CRI-O's own files say all of it", "")
	default:
		file := c.inForce.DropIns[0]
		have, err := os.ReadFile(file)
		switch {
		case err != nil:
			c.check(check, err, "")
		case len(unmet) > 0 && bytes.Equal(have, want):
			c.add(check, checkFailed, "a file that is read after "+file+" overrides it: "+strings.Join(unmet, "; "),
				"give it a name that comes last, by [crio] drop_in")
		case !bytes.Equal(have, want):
			c.add(check, checkFailed, file+" is not as ocihold's and CRI-O's configuration would have it now", writeDropIn)
		default:
			c.add(check, checkOK, file, "")
		}
	}
}

// checkMisplaced looks for files that nobody reads, though somebody may think
// so.
func (c *checker) checkMisplaced() {
	const check = "misplaced files"
	found := false
	misplaced := func(result, detail, fix string) {
		found = true
		c.add(check, result, detail, fix)
	}
	etc := filepath.Dir(c.config.CRIO.Config)
	for _, name := range []string{"conf.d", "crio.d", "config.d", "crio.conf.d"} {
		dir := filepath.Join(etc, name)
		if dir == filepath.Clean(c.config.CRIO.ConfigDir) {
			continue
		}
		if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
			misplaced(checkFailed, fmt.Sprintf("CRI-O does not read %s, where %s is", dir, entries[0].Name()),
				"move what is needed to "+c.config.CRIO.ConfigDir)
		}
	}
	if dropIn := filepath.Join(etc, filepath.Base(c.config.DropInFile())); fileExists(dropIn) {
		misplaced(checkFailed, "CRI-O does not read "+dropIn, "move it to "+c.config.CRIO.ConfigDir)
	}
	for _, suffix := range []string{"~", ".bak", ".orig", ".old", ".swp", ".rpmsave", ".rpmnew", ".dpkg-old", ".dpkg-dist"} {
		files, _ := filepath.Glob(filepath.Join(escapeGlob(c.config.CRIO.ConfigDir), "*"+suffix))
		for _, file := range files {
			misplaced(checkWarning, "CRI-O reads "+file+" like any other file there", "remove it")
		}
	}
	own, err := os.ReadDir(c.app.configFile + ".d")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		misplaced(checkFailed, err.Error(), "")
	}
	for _, entry := range own {
		if !strings.HasSuffix(entry.Name(), ".toml") {
			misplaced(checkWarning, "ocihold does not read "+filepath.Join(c.app.configFile+".d", entry.Name()), "give it a name that ends in .toml")
		}
	}
	if !found {
		c.add(check, checkOK, "none", "")
	}
}

func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

func fileExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// checkLive asks the running CRI-O.
func (c *checker) checkLive(ctx context.Context) {
	const check = "CRI-O"
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	live, err := crio.NewClient(c.inForce.Listen).Config(ctx)
	if err != nil {
		c.add(check, checkFailed, err.Error(), "systemctl start crio; if it runs with another configuration, set [crio] config and config_dir")
		return
	}
	c.live = live
	if filepath.Clean(live.Root) != c.inForce.Root {
		c.add(check, checkFailed, fmt.Sprintf("it runs with root %s, its files say %s", live.Root, c.inForce.Root),
			"set the root in CRI-O's configuration and not on its command line, then systemctl restart crio ocihold")
		return
	}
	if unmet := conf.Unmet(c.config, live); len(unmet) > 0 {
		fix := "systemctl restart crio"
		if len(conf.Unmet(c.config, c.inForce)) > 0 {
			fix = writeDropIn
		}
		c.add(check, checkFailed, "it runs with other settings: "+strings.Join(unmet, "; "), fix)
		return
	}
	c.add(check, checkOK, "internal_repair is off, NRI is on, it reads the roots of handlers", "")
}

// checkRoots looks whether the handlers' roots are there, for this process and
// for CRI-O.
func (c *checker) checkRoots(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	pid := 0
	if c.live != nil {
		pid, _ = crio.NewClient(c.inForce.Listen).PID(ctx)
	}
	for _, h := range c.config.Roots() {
		check := "root of " + h.Name
		err := storage.CheckRoot(storage.Options{Name: h.Name, GraphRoot: h.Root})
		if err == nil && pid != 0 {
			err = sameForProcess(pid, h.Root)
		}
		if err != nil {
			c.add(check, checkFailed, err.Error(), "mount its disk, or, for a new root, ocihold config crio --write; then systemctl restart crio ocihold")
			continue
		}
		c.add(check, checkOK, h.Root, "")
	}
}

// sameForProcess makes sure that a directory is the same one for a process,
// which may be in another mount namespace.
func sameForProcess(pid int, dir string) error {
	here, err := os.Stat(dir)
	if err != nil {
		return err
	}
	there, err := os.Stat(filepath.Join("/proc", fmt.Sprint(pid), "root", dir))
	if err != nil {
		return fmt.Errorf("CRI-O (process %d) does not see %s: %w", pid, dir, err)
	}
	if !os.SameFile(here, there) {
		return fmt.Errorf("CRI-O (process %d) sees another directory at %s", pid, dir)
	}
	return nil
}

// checkWritable warns where only volumes that are read-only can be had.
func (c *checker) checkWritable() {
	if err := scratch.Supported(); err != nil {
		c.add("writable volumes", checkWarning, err.Error(), "as it says, unless no pod has volumes with readOnly: false")
		return
	}
	c.add("writable volumes", checkOK, "", "")
}

func (c *checker) checkDaemon(ctx context.Context) {
	const check = "daemon"
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	status, err := control.NewClient(controlSocket(c.config)).Status(ctx)
	switch {
	case err != nil:
		c.check(check, err, "systemctl enable --now ocihold")
	case !status.Registered:
		c.add(check, checkFailed, "it is not registered with CRI-O as an NRI plugin", "look at its log: journalctl -u ocihold")
	case status.Version != version():
		c.add(check, checkWarning, fmt.Sprintf("it is version %s, this is %s", status.Version, version()), "systemctl restart ocihold")
	default:
		c.add(check, checkOK, "it is registered with CRI-O as an NRI plugin", "")
	}
}

// checkImageService looks whether somebody listens where kubelet is to connect.
func (c *checker) checkImageService(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.config.ImageSocket())
	if err == nil {
		err = conn.Close()
	}
	c.check("image service", err, "systemctl restart ocihold")
}

// checkImages looks for images that CRI-O runs from another root than one would
// think.
func (c *checker) checkImages(ctx context.Context) {
	const check = "images"
	if len(c.config.Roots()) == 0 {
		return
	}
	roots, err := openRoots(c.config, c.inForce, c.app.logger(c.config))
	switch {
	case errors.Is(err, storage.ErrRunRoot):
		c.check("runroot", err, "set it back in ocihold's configuration, or end what uses the root")
		return
	case err != nil:
		c.check(check, err, "")
		return
	}
	defer func() {
		if err := roots.Close(); err != nil {
			c.check(check, err, "")
		}
	}()
	before := len(c.findings)
	leans, err := roots.Leaning(ctx)
	if err != nil {
		c.check(check, err, "")
	}
	for _, lean := range leans {
		name := imageName(lean.Names, lean.ImageID)
		detail := fmt.Sprintf("image %s in CRI-O's root leans on layers in the roots of %s: CRI-O pulled it itself", name, strings.Join(lean.Handlers, ", "))
		if lean.Missing {
			detail = fmt.Sprintf("image %s in CRI-O's root needs layers that are in no root, and CRI-O cannot list images", name)
		}
		c.add(check, checkFailed, detail, fmt.Sprintf("ocihold rmi --handler default %s && ocihold pull --handler default %s", name, name))
	}
	list, errs := roots.List(ctx)
	for _, err := range errs {
		if !errors.Is(err, storage.ErrUnmounted) { // said with the roots
			c.check(check, err, "")
		}
	}
	for _, image := range list {
		if len(image.Handlers) > 1 && slices.Contains(image.Handlers, conf.DefaultHandler) {
			c.add(check, checkWarning, fmt.Sprintf("image %s is in the roots of %s: CRI-O runs it from its own, the default one",
				imageName(image.Names, image.ID), strings.Join(image.Handlers, ", ")), "")
		}
	}
	if len(c.findings) == before {
		c.add(check, checkOK, "none leans on another root", "")
	}
}

func imageName(names []string, id string) string {
	if len(names) > 0 {
		return names[0]
	}
	return id
}
