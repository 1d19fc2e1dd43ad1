package storage

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOpenRefuses(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Options)
		is     error
		text   string
	}{
		"vfs driver":         {func(o *Options) { o.Driver = "vfs" }, ErrUnsupported, `storage driver "vfs"`},
		"btrfs driver":       {func(o *Options) { o.Driver = "btrfs" }, ErrUnsupported, `set storage_driver = "overlay"`},
		"mount_program":      {func(o *Options) { o.DriverOptions = []string{"overlay.mount_program=/usr/bin/fuse-overlayfs"} }, ErrUnsupported, "mount_program"},
		"overlay2 alias":     {func(o *Options) { o.DriverOptions = []string{"overlay2.mount_program=/x"} }, ErrUnsupported, "mount_program"},
		"composefs":          {func(o *Options) { o.DriverOptions = []string{"use_composefs=true"} }, ErrUnsupported, "use_composefs"},
		"no graph root":      {func(o *Options) { o.GraphRoot = "" }, nil, "both required"},
		"no run root":        {func(o *Options) { o.RunRoot = "" }, nil, "both required"},
		"insecure registry":  {func(o *Options) { o.InsecureRegistries = []string{" "} }, ErrInvalidReference, "empty entry"},
		"temp dir is a file": {func(o *Options) { o.TempDir = o.RegistriesConf }, nil, "directory for downloads"},
	} {
		t.Run(name, func(t *testing.T) {
			opt := testOptions(t)
			tc.change(&opt)
			_, err := Open(opt)
			require.Error(t, err)
			assert.Contains(t, err.Error(), tc.text)
			assert.Contains(t, err.Error(), `handler "default"`)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			assert.NoDirExists(t, filepath.Join(filepath.Dir(opt.RegistriesConf), "root"))
		})
	}
}

func TestOverlayOptions(t *testing.T) {
	ours := []string{"overlay.sync=filesystem", "overlay.skip_mount_home=true"}
	for name, tc := range map[string]struct{ in, want []string }{
		"none":                    {nil, nil},
		"kept":                    {[]string{"overlay.mountopt=nodev"}, []string{"overlay.mountopt=nodev"}},
		"without driver":          {[]string{"ignore_chown_errors=true"}, []string{"ignore_chown_errors=true"}},
		"other driver":            {[]string{"vfs.imagestore=/a", "btrfs.min_space=1G"}, nil},
		"image stores":            {[]string{"overlay.imagestore=/a", "overlay2.imagestore=/b", "imagestore=/c", "overlay.additionalimagestores=/d"}, nil},
		"layer store":             {[]string{"overlay.additionallayerstore=/a:ref"}, nil},
		"ours win":                {[]string{"overlay.sync=none", "overlay.skip_mount_home=false"}, nil},
		"kept beside image store": {[]string{"overlay.imagestore=/a", "overlay.size=1G"}, []string{"overlay.size=1G"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := overlayOptions(tc.in)
			require.NoError(t, err)
			assert.Equal(t, append(append([]string{}, tc.want...), ours...), got)
		})
	}
}

func TestOpenClearsDownloadsOfTheDead(t *testing.T) {
	opt := testOptions(t)
	dead := filepath.Join(opt.TempDir, tempPrefix+"123")
	other := filepath.Join(opt.TempDir, "other")
	require.NoError(t, os.MkdirAll(dead, 0o700))
	require.NoError(t, os.MkdirAll(other, 0o700))
	write(t, filepath.Join(dead, "1"), "blob")

	first := open(t, opt)
	second := open(t, opt)
	assert.NoDirExists(t, dead)
	assert.DirExists(t, other)
	assert.DirExists(t, first.downloads.path)
	assert.NotEqual(t, first.downloads.path, second.downloads.path)
	require.NoError(t, first.Close())
	assert.NoDirExists(t, first.downloads.path)
	assert.DirExists(t, second.downloads.path)
}

func TestOpenLeavesAdditionalStoresOut(t *testing.T) {
	reg := newRegistry(t)
	img := imageOf(t, "a")
	reg.push(t, "a:1", img)
	otherOpt := testOptions(t)
	_, err := open(t, otherOpt).Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)

	opt := testOptions(t)
	opt.DriverOptions = []string{"overlay.imagestore=" + otherOpt.GraphRoot}
	root := open(t, opt)
	_, err = root.Resolve(t.Context(), reg.host+"/a:1")
	require.ErrorIs(t, err, ErrNotFound)
	_, err = root.Pull(t.Context(), reg.host+"/a:1", PullOptions{})
	require.NoError(t, err)
	assert.Len(t, layerIDs(t, root), 1, "the layer is in the root itself")
}

func TestClosed(t *testing.T) {
	root := open(t, testOptions(t))
	require.NoError(t, root.Close())
	id := "0123456789012345678901234567890123456789012345678901234567890123"
	_, err := root.Resolve(t.Context(), "a")
	require.ErrorIs(t, err, ErrClosed)
	_, err = root.Pull(t.Context(), "a", PullOptions{})
	require.ErrorIs(t, err, ErrClosed)
	_, errs := root.Images(t.Context())
	require.Len(t, errs, 1)
	require.ErrorIs(t, errs[0], ErrClosed)
	require.ErrorIs(t, root.Lease(t.Context(), id), ErrClosed)
	require.ErrorIs(t, root.Release(t.Context(), id), ErrClosed)
	_, err = root.Leases(t.Context())
	require.ErrorIs(t, err, ErrClosed)
	_, err = root.LowerDirs(t.Context(), id, nil)
	require.ErrorIs(t, err, ErrClosed)
}

func TestInsecureRegistries(t *testing.T) {
	insecure, err := parseInsecureRegistries([]string{"plain.example", "port.example:5000", "10.1.2.3/16", "fd00::/8"})
	require.NoError(t, err)
	hosts := map[string][]net.IP{
		"in.example":  {net.ParseIP("203.0.113.1"), net.ParseIP("10.1.200.1")},
		"out.example": {net.ParseIP("10.2.0.1")},
	}
	lookup := func(host string) ([]net.IP, error) {
		if ip := net.ParseIP(host); ip != nil {
			return []net.IP{ip}, nil
		}
		if ips, ok := hosts[host]; ok {
			return ips, nil
		}
		return nil, &net.DNSError{Name: host, IsNotFound: true}
	}
	for registry, want := range map[string]bool{
		"plain.example":      true,
		"plain.example:5000": false,
		"port.example:5000":  true,
		"port.example":       false,
		"127.0.0.1:5000":     true,
		"127.1.2.3":          true,
		"10.1.9.9:80":        true,
		"10.2.9.9":           false,
		"[fd00::1]:5000":     true,
		"[fd00::1]":          true,
		"[fe80::1]:5000":     false,
		"in.example:5000":    true,
		"out.example":        false,
		"nowhere.example":    false,
	} {
		assert.Equal(t, want, insecure.match(registry, lookup), registry)
	}
}

func FuzzParseInsecureRegistries(f *testing.F) {
	for _, seed := range []string{"", "a", "10.0.0.0/8", "10.0.0.1/33", "::1/128", "host:1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, entry string) {
		insecure, err := parseInsecureRegistries([]string{entry})
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidReference)
			return
		}
		assert.Equal(t, 2, len(insecure.names)+len(insecure.networks))
	})
}
